"""Records as values that JSON has, and back; which fields there are, a report's dataclass says.

Invariant: what is written means the same in another process: names, sites, dtypes, shapes, devices
and bytes, and no identity of an object.
"""

from __future__ import annotations

import functools
import math
import numbers
import reprlib
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from tenure._errors import ReportFormatError

ADVICE_OF_CUT = "It was cut or altered after to_dict() gave it: write it anew."
_OF_TORCH = "torch."
_IN_SHORT = reprlib.Repr()
_IN_SHORT.maxlevel, _IN_SHORT.maxstring = 3, 100
_NOT_FINITE = ("nan", "inf", "-inf")
_MOST = 2**64
_AS_THEY_ARE = (str, int, bool, types.NoneType)


def plain(value: object) -> Any:
    """A value of a report as JSON has it.

    Of a dataclass, every field under its name, or under the ``"key"`` of its metadata (None leaves
    it out), and the properties that its class lists as ``_figures``.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        facts = {name: plain(getattr(value, name)) for name in getattr(value, "_figures", ())}
        return facts | {key: plain(getattr(value, name)) for key, name in _keys(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix(_OF_TORCH)
    # numbers of numpy among them: as they are, JSON has no word for them
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        # nan and inf, which no JSON has: a model that diverged is reported as well
        return number if math.isfinite(number) else str(number)
    # a size that is a symbol is known by how it is spelled
    return str(value)


def restored(hint: Any, value: object, place: str) -> Any:
    """What `plain` made this value from.

    Args:
        hint: the type that it had.
        value: what JSON has.
        place: what it is in the report, for the error.

    Raises:
        ReportFormatError: it can't be of that type.
    """
    kind = get_origin(hint) or hint
    # Both spellings: `X | None` in a class is the one, Optional[X] of an alias the other.
    if kind is Union or kind is types.UnionType:
        return _of_any(get_args(hint), value, place)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _record(kind, value, place)
    if kind is tuple and isinstance(value, list):
        return tuple(_items(get_args(hint), value, place))
    if kind in (dict, Mapping) and isinstance(value, Mapping):
        inner = get_args(hint)[1]
        return {key: restored(inner, v, f"{place}[{key!r}]") for key, v in value.items()}
    if kind is float and (_is_number(value) or value in _NOT_FINITE):
        return float(value)  # type: ignore[arg-type]
    if kind in (torch.dtype, torch.device) and isinstance(value, str):
        return _of_torch(kind, value, place)
    # By exact type: True is an int to isinstance, and no number of bytes.
    if value in get_args(hint) if kind is Literal else type(value) is kind:
        if type(value) is not int or _is_number(value):
            return value
        hint = "number of 64 bits"
    raise ReportFormatError(
        f"{place} is {shortened(value)}, and no {_spelled(hint)}. {ADVICE_OF_CUT}"
    )


def _is_number(value: object) -> bool:
    return type(value) is int and abs(value) < _MOST


def _record(cls: Any, value: Mapping[str, object], place: str) -> Any:
    hints, found = _hints(cls), {}
    for key, name in _keys(cls):
        if key not in value:
            raise ReportFormatError(f"{place}.{key} is missing. {ADVICE_OF_CUT}")
        found[name] = restored(hints[name], value[key], f"{place}.{key}")
    return cls(**found)


def _items(hints: tuple[Any, ...], values: list[Any], place: str) -> Iterator[Any]:
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(values)
    if len(hints) != len(values):
        text = f"{place} has {len(values)} values, and should have {len(hints)}. {ADVICE_OF_CUT}"
        raise ReportFormatError(text)
    for i, (hint, value) in enumerate(zip(hints, values, strict=True)):
        yield restored(hint, value, f"{place}[{i}]")


def _of_any(hints: tuple[Any, ...], value: object, place: str) -> Any:
    """Of the type that fits; where none does, the error is that of the first."""
    if value is None and types.NoneType in hints:
        return None
    failure: ReportFormatError | None = None
    for hint in hints:
        try:
            return restored(hint, value, place)
        except ReportFormatError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _of_torch(kind: Any, value: str, place: str) -> Any:
    try:
        found = torch.device(value) if kind is torch.device else vars(torch).get(value)
    except RuntimeError:
        found = None
    if isinstance(found, kind):
        return found
    # a device of a backend that gives itself a name is known once the backend is imported
    raise ReportFormatError(
        f"{place} is {shortened(value)}, a {_spelled(kind)} that this torch does not know. Read "
        "the report where its backend is imported, with a torch as new."
    )


@functools.cache
def _keys(cls: type[Any]) -> tuple[tuple[str, str], ...]:
    """The key and the name of each field that is written."""
    named = ((field.metadata.get("key", field.name), field.name) for field in fields(cls))
    return tuple((key, name) for key, name in named if key is not None)


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _spelled(hint: Any) -> str:
    name = getattr(hint, "__name__", "")
    return name if name and not get_args(hint) else str(hint)


def shortened(value: object) -> str:
    """The repr of a value, however long or deep, in at most 40 characters."""
    try:
        text = _IN_SHORT.repr(value)
    # of a number with thousands of digits
    except ValueError:
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
