"""Show a report wherever it is printed, and write it down as data that outlives its process.

Invariant: what is written means the same in another process: names, sites, dtypes, shapes, devices
and bytes, and no identity of an object.
"""

from __future__ import annotations

import functools
import math
import numbers
import reprlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from tenure._errors import ProfilerUsageError, ReportFormatError

from ._part import Part, in_html, in_text

if TYPE_CHECKING:
    from rich.console import Group

_ADVICE_OF_CUT = "It was cut or altered after to_dict() gave it: write it anew."
_HOME, _OF_TORCH = "tenure.", "torch."
_IN_SHORT = reprlib.Repr()
_IN_SHORT.maxlevel, _IN_SHORT.maxstring = 3, 100
_NOT_FINITE = ("nan", "inf", "-inf")
_MOST = 2**64
_AS_THEY_ARE = (str, int, bool, types.NoneType)
_Record = TypeVar("_Record")


class Shown:
    """Something that shows itself: as text, in a rich terminal, in a notebook.

    A class states its parts in ``_parts``, and whether a blank line is between these.
    """

    __slots__ = ()
    _is_spaced: ClassVar[bool] = False

    def _parts(self) -> Sequence[Part]:
        raise NotImplementedError

    def text(
        self, *, top: int | None = None, sort: str | None = None, width: int | None = None
    ) -> str:
        """Return the report as lines, with other rows than ``print`` shows.

        Args:
            top: how many rows of each table are shown, the rest being summed up in one more;
                without it 20, in a recording 10.
            sort: the heading of the column that rows are sorted by: figures the largest first,
                names by the alphabet. Tables without that column keep their order.
            width: the columns of a line; without it those of the terminal, and 80 where there is
                none.

        Raises:
            ProfilerUsageError: no table has such a column, or ``top`` is below 0.
        """
        return in_text(self.rich(top=top, sort=sort), width)

    def __str__(self) -> str:
        return self.text()

    def rich(self, *, top: int | None = None, sort: str | None = None) -> Group:
        """Return the same lines for rich, in colours; the arguments are those of `text`."""
        from rich.console import Group

        parts = self._parts()
        if top is not None and top < 0:
            raise ProfilerUsageError(f"top={top} is no number of rows. Pass 0 or more.")
        known = dict.fromkeys(heading for part in parts for heading in part.sorts())
        if sort is not None and sort not in known:
            there = f"There are {', '.join(map(repr, known))}" if known else "It has no tables"
            raise ProfilerUsageError(f"No table of this report has a column {sort!r}. {there}.")
        arranged = [part.arranged(top, sort) for part in parts]
        if not self._is_spaced:
            return Group(*arranged)
        return Group(*[each for part in arranged for each in ("", part)][1:])

    def __rich__(self) -> Group:
        return self.rich()

    def _repr_html_(self) -> str:
        return in_html(self.rich())


class Report(Shown):
    """A report that can be written down, and read by another process.

    A subclass is a dataclass whose fields are what it is made of.
    """

    __slots__ = ()
    # raised when a reader of the older version would misread what is written
    _version: ClassVar[int] = 1
    # properties that are written beside the fields, for readers other than ``from_dict``
    _figures: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the report as values that JSON has, with its ``"format"`` and ``"version"``."""
        head = {"format": _HOME + type(self).__name__, "version": self._version}
        return {**head, **self._facts()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Read a report that ``to_dict`` gave, in this process or in another one.

        Args:
            data: the dictionary, such as ``json.load()`` reads it from a file.

        Raises:
            ReportFormatError: it is of another kind or of a newer version, or it has been altered.
        """
        _refuse_others(cls, data)
        return restored(cls, data)

    def _facts(self) -> dict[str, Any]:
        return facts_of(self)


def _refuse_others(cls: type[Report], data: object) -> None:
    reader = f"{cls.__name__}.from_dict()"
    kind = data.get("format") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(kind, str) or not kind.startswith(_HOME):
        raise ReportFormatError(
            f"{reader} got {shortened(data)}, which is no report of tenure. Pass the dictionary "
            "that to_dict() gave, as json.load() reads it from a file."
        )
    if kind != _HOME + cls.__name__:
        raise ReportFormatError(
            f"{reader} got {kind!r}, which is another kind of report. Read it with "
            f"{kind.removeprefix(_HOME)}.from_dict()."
        )
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= cls._version:
        raise ReportFormatError(
            f"{reader} got version {shortened(version)} of {kind!r}, and this tenure knows version "
            f"{cls._version}. Read it with the tenure that wrote it, or update this one."
        )


# --- values that JSON has, and back


def plain(value: object) -> Any:
    """Return a value of a report as JSON has it; of a report in it, its ``to_dict()``."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, Report):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return facts_of(value)
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


def facts_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON has them, and the properties in its ``_figures``.

    A field is under its name, or under the ``"key"`` of its metadata, where None leaves it out.
    """
    cls: Any = type(record)
    facts = {name: plain(getattr(record, name)) for name in getattr(cls, "_figures", ())}
    written = _fields(cls).items()
    return facts | {key: plain(getattr(record, field.name)) for key, field in written}


def restored(cls: type[_Record], facts: Mapping[str, object], place: str = "") -> _Record:
    """Return the record that `facts_of` made this from; a field that is missing has its default.

    Args:
        cls: the dataclass.
        facts: what JSON has.
        place: the record's name in errors; empty for that of its class.

    Raises:
        ReportFormatError: it can't be such a record.
    """
    found: dict[str, Any] = {}
    kind: Any = cls
    place = place or cls.__name__
    for key, field in _fields(kind).items():
        if key in facts:
            hint = _hints(kind)[field.name]
            found[field.name] = _restored(hint, facts[key], f"{place}.{key}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ReportFormatError(f"{place}.{key} is missing. {_ADVICE_OF_CUT}")
    return cls(**found)


def _restored(hint: Any, value: object, place: str) -> Any:
    kind = record = get_origin(hint) or hint
    # Both spellings: `X | None` in a class is the one, Optional[X] of an alias the other.
    if kind is Union or kind is types.UnionType:
        return _of_any(get_args(hint), value, place)
    if isinstance(value, Mapping) and is_dataclass(kind):
        is_report = isinstance(kind, type) and issubclass(kind, Report)
        return record.from_dict(value) if is_report else restored(record, value, place)
    if isinstance(value, Mapping) and kind in (dict, Mapping):
        inner = get_args(hint)[1]
        return {key: _restored(inner, v, f"{place}[{key!r}]") for key, v in value.items()}
    if isinstance(value, list) and kind is tuple:
        hints = get_args(hint)
        if hints[-1] is Ellipsis:
            hints = hints[:1] * len(value)
        if len(hints) != len(value):
            told = f"{place} has {len(value)} values, and should have {len(hints)}."
            raise ReportFormatError(f"{told} {_ADVICE_OF_CUT}")
        pairs = enumerate(zip(hints, value, strict=True))
        return tuple(_restored(each, inner, f"{place}[{i}]") for i, (each, inner) in pairs)
    if kind is float and (_is_number(value) or value in _NOT_FINITE):
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, str) and kind in (torch.dtype, torch.device):
        return _of_torch(kind, value, place)
    # By exact type: True is an int to isinstance, and no number of bytes.
    if value in get_args(hint) if kind is Literal else type(value) is kind:
        if type(value) is not int or _is_number(value):
            return value
        hint = "number of 64 bits"
    raise ReportFormatError(
        f"{place} is {shortened(value)}, and no {_spelled(hint)}. {_ADVICE_OF_CUT}"
    )


def _is_number(value: object) -> bool:
    return type(value) is int and abs(value) < _MOST


def _of_any(hints: tuple[Any, ...], value: object, place: str) -> Any:
    """Return a value of the type that fits; if none does, raise the error of the first."""
    if value is None and types.NoneType in hints:
        return None
    failure: ReportFormatError | None = None
    for hint in hints:
        try:
            return _restored(hint, value, place)
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
def _fields(cls: Any) -> dict[str, Field[Any]]:
    """Return the fields that are written, by their keys."""
    named = {field.metadata.get("key", field.name): field for field in fields(cls)}
    named.pop(None, None)
    return named


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _spelled(hint: Any) -> str:
    name = getattr(hint, "__name__", "")
    return name if name and not get_args(hint) else str(hint)


def shortened(value: object) -> str:
    """Return the repr of a value, however long or deep, in at most 40 characters."""
    text = _IN_SHORT.repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
