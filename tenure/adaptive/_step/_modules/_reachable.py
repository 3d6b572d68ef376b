"""The modules and tensors that a function can reach: captured, bound, or named in its code.

Invariant: only what the code names counts, so that a model which happens to stand beside the one
that is trained isn't taken for a part of the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError

from ..._callables import short_name_of, unused
from ..._undo import Generator, generator_kinds, is_gone
from ._code_names import names_in

T = TypeVar("T")

_MAX_DEPTH = 8
_MAX_ITEMS = 256
_LIBRARIES = ("torch", "numpy", "builtins")


class Reachable:
    """What some functions use.

    Attributes:
        modules: the modules found, by the name under which the code has them.
        tensors: the tensors found that require grad, by name.
        generators: the generators of random numbers found.

    What has the name of something else gets a number: two objects may each have a ``self.net``.
    """

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self.generators: list[Generator] = []
        self._generator_kinds = generator_kinds()
        self._seen: dict[tuple[int, frozenset[str]], Any] = {}  # keeps what its ids belong to
        for function in functions:
            if function is not None:
                self._visit(short_name_of(function), function, frozenset(), 0)

    def captured(self) -> list[Tensor]:
        """The leaves that are no parameters of a module."""
        return [tensor for tensor in self.tensors.values() if tensor.is_leaf]

    def computed(self) -> list[str]:
        """The names of the tensors that come of a computation of before."""
        return [name for name, tensor in self.tensors.items() if not tensor.is_leaf]

    def _visit(self, name: str, value: Any, attributes: frozenset[str], depth: int) -> None:
        value = _behind(value)
        key = (id(value), attributes)
        if isinstance(value, _PLAIN) or key in self._seen or depth > _MAX_DEPTH:
            return
        self._seen[key] = value
        if isinstance(value, nn.Module):
            _note(self.modules, name, value)
        elif isinstance(value, Tensor):
            if not is_gone(value) and value.requires_grad:
                _note(self.tensors, name, value)
        elif isinstance(value, self._generator_kinds):
            self.generators.append(value)
        else:
            for below, child, names in _below(name, value, attributes):
                self._visit(below, child, names, depth + 1)


def _behind(value: Any) -> Any:
    """The object itself, or what it is a weak proxy of; None once that is gone."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__repr__.__self__
    except ReferenceError:
        return None


def _note(known: dict[str, T], name: str, value: T) -> None:
    if all(value is not other for other in known.values()):
        known[unused(name, known)] = value


_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_Found = tuple[str, Any, frozenset[str]]


def modules_given(entry: str, model: nn.Module | Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The modules of the argument ``model`` of ``entry``, by name.

    Raises:
        AdaptiveUsageError: it is something else.
    """
    model = _behind(model)
    if isinstance(model, nn.Module):
        return {"model": model}
    several = {f"model[{i}]": _behind(each) for i, each in enumerate(_several(model))}
    if not several or any(not isinstance(each, nn.Module) for each in several.values()):
        raise AdaptiveUsageError(
            f"{entry}() got a {type(model).__name__} as model=. Pass the nn.Module that the "
            "function runs, or a list of them."
        )
    return several


def _several(model: Any) -> list[Any]:
    return list(model) if isinstance(model, Iterable) else []


def _below(name: str, value: Any, attributes: frozenset[str]) -> Iterator[_Found]:
    if isinstance(value, functools.partial):
        for i, child in enumerate((value.func, *value.args)):
            yield f"{name} argument {i}" if i else short_name_of(value.func), child, attributes
        yield from ((key, child, attributes) for key, child in value.keywords.items())
    elif isinstance(value, weakref.ref):
        yield name, value(), attributes
    elif isinstance(value, MethodType):
        yield from _of_method(value)
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, Mapping):
        items = list(value.items())[:_MAX_ITEMS]
        yield from ((f"{name}[{key!r}]", child, attributes) for key, child in items)
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(value)[:_MAX_ITEMS]
        yield from ((f"{name}[{i}]", child, attributes) for i, child in enumerate(items))
    else:
        yield from _of_object(name, value, attributes)


def _of_function(function: FunctionType) -> Iterator[_Found]:
    if _is_of_a_library(function.__module__):
        return
    code = function.__code__
    names = names_in(code)
    yield from _captured(function, names.attributes)
    for key in sorted(names.globals & function.__globals__.keys()):
        yield key, function.__globals__[key], names.attributes
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for key, child in zip(code.co_varnames[first : code.co_argcount], defaults, strict=True):
        yield key, child, names.attributes
    for key, child in (function.__kwdefaults__ or {}).items():
        yield key, child, names.attributes
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield short_name_of(wrapped), wrapped, names.attributes


def _captured(function: FunctionType, attributes: frozenset[str]) -> Iterator[_Found]:
    cells = function.__closure__ or ()
    for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield key, cell.cell_contents, attributes
        except ValueError:  # the variable has no value yet
            continue


def _of_method(method: MethodType) -> Iterator[_Found]:
    function: Any = method.__func__
    yield short_name_of(function), function, frozenset()
    if isinstance(function, FunctionType):
        yield "self", method.__self__, names_in(function.__code__).attributes


def _of_object(name: str, value: Any, attributes: frozenset[str]) -> Iterator[_Found]:
    """The attributes of an object that the code names, and its ``__call__``."""
    if isinstance(value, ModuleType | type):
        if _is_of_a_library(value.__name__ if isinstance(value, ModuleType) else value.__module__):
            return
    elif isinstance(getattr(type(value), "__call__", None), FunctionType):  # noqa: B004  # not a test
        yield name, value.__call__, attributes
    if isinstance(value, type):
        yield from _of_class(name, None, value, attributes)
        return
    space = getattr(value, "__dict__", {})
    for key in sorted(attributes & space.keys()):
        yield f"{name}.{key}", space[key], attributes
    if "__wrapped__" in space:  # functools.cache
        yield name, space["__wrapped__"], attributes
    if not isinstance(value, ModuleType):
        yield from _of_class(name, value, type(value), attributes)


def _of_class(
    name: str, instance: object, owner: type, attributes: frozenset[str]
) -> Iterator[_Found]:
    """What a class has for its instances, or for itself: methods, code of properties, values."""
    spaces = [vars(kind) for kind in owner.__mro__ if not _is_of_a_library(kind.__module__)]
    for key in sorted(attributes):
        found = next((space[key] for space in spaces if key in space), None)
        if found is not None:
            yield f"{name}.{key}", _bound(found, instance, owner), attributes


def _bound(found: Any, instance: object, owner: type) -> Any:
    """What an attribute of a class is made of; no code of the user's runs."""
    if isinstance(found, classmethod):
        return MethodType(found.__func__, owner)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, MemberDescriptorType):  # of __slots__
        return None if instance is None else _slot(found, instance)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = found.func
    is_method = isinstance(found, FunctionType) and instance is not None
    return MethodType(found, instance) if is_method else found


def _slot(member: MemberDescriptorType, instance: object) -> Any:
    try:
        return member.__get__(instance)
    except AttributeError:  # it has no value yet
        return None


def _is_of_a_library(module: str | None) -> bool:
    return str(module or "").partition(".")[0] in _LIBRARIES
