"""Where code keeps tensors between its calls, noted so that those of a run can be taken out again.

That is the variables of Python modules, of classes and of closures, what stands in containers and
objects below them, and caches of `functools`.

Invariant: only what holds one of these tensors is touched, so that counters and the like, and what
other threads write meanwhile, stay as they are.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._heap import instance_attributes
from tenure._torch.autograd import hooks_of
from tenure._torch.quiet import without_functions

from ._notes import ContainerNote, entries, noted_container
from ._rollback import CACHE, home_of, homes_of, is_a, is_library, variables_of

_MOST_ITEMS = 1_000
"""In a container that is noted: what holds more is a data set."""
_MOST_STEPS = 12
_HOLDING = ("collections", "types", "weakref")
"""Those with classes whose objects are containers."""
_NEVER = (Tensor, nn.Module, Optimizer, FrameType)
_ROOTS = (type, ModuleType, nn.Module, Optimizer)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), ModuleType)
_NOTHING = object()


class _CachePlace(NamedTuple):
    """Something that holds values by key, and what it held.

    Attributes:
        holder: a class, a variable of a closure, or a container.
        note: what it held.
    """

    holder: Any
    note: dict[Any, Any] | ContainerNote

    def take_out(self, wanted: dict[int, Any]) -> bool:
        """Put back what it held where it now holds one of the wanted; False where it held it."""
        holder, note = self
        before: Any = note
        now: Any = None
        if isinstance(note, ContainerNote):
            before, now = note.items, note.kind.read(holder)
            if not isinstance(before, dict) or isinstance(holder, OrderedDict):
                is_same = note.is_same()
                note.undo()
                return not is_same
        else:
            now = _attributes(holder)
        is_out = True
        for key, value in now.items():
            if id(value) not in wanted and id(key) not in wanted:
                continue
            if before.get(key, _NOTHING) is value:
                is_out = False
            elif key in before:
                _write(holder, key, before[key])
            else:
                _remove(holder, key)
        return is_out


class Caches:
    """What the code of some objects keeps tensors in, as it is now.

    Args:
        objects: modules, functions and other objects that a run uses. The variables of the Python
            modules that their classes and code are from count, and those of the Python modules of
            the functions that these name.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._places: dict[int, _CachePlace] = {}
        # kept, so that an id stands for one object
        self._seen: dict[int, Any] = {}
        objects = [*objects]
        objects += [v for each in objects if is_a(each, nn.Module) for v in _functions_of(each)]
        homes = self._homes = homes_of(objects)
        variables = variables_of(homes)
        # a list of each: another thread may set a variable meanwhile
        imported = [value for space in variables for value in list(space.values())]
        self._note([*variables, *objects], 3)
        self._note(variables_of(homes_of(imported) - homes), 2)

    def take_out(self, tensors: list[Tensor]) -> bool:
        """Take tensors out of the places that were noted, and empty caches of functools with them.

        Args:
            tensors: those that were made since.

        Returns:
            Whether somewhere else, which was not noted, holds some of them; variables of functions
            that run do not count.
        """
        wanted: dict[int, Any] = {id(each): each for each in tensors}
        reached: dict[int, _CachePlace] = {}
        caches: list[Any] = []
        is_elsewhere = False
        level: list[Any] = [*tensors]
        ours = {id(each) for each in (tensors, wanted, reached, caches, self._seen)}
        for _ in range(_MOST_STEPS):
            ours.add(id(level))
            further: dict[int, Any] = {}
            for each in gc.get_referrers(*level):
                if id(each) in ours or id(each) in wanted or type(each) is FrameType:
                    continue
                if id(each) in self._places:
                    reached[id(each)] = self._places[id(each)]
                elif type(each) is CACHE:
                    caches.append(each)
                elif is_a(each, *_ROOTS):
                    is_elsewhere = True
                else:
                    further[id(each)] = each
            wanted |= further
            level = list(further.values())
            if not level:
                break
        for place in reached.values():
            is_elsewhere |= not place.take_out(wanted)
        for cache in caches:
            cache.cache_clear()
        return is_elsewhere

    def _note(self, roots: Iterable[Any], n_levels: int) -> None:
        level = [*roots]
        for _ in range(n_levels):
            below: list[Any] = []
            for value in level:
                if type(value) in _PLAIN or id(value) in self._seen or is_a(value, *_NEVER):
                    continue
                self._seen[id(value)] = value
                below += self._note_one(value)
            level = below

    def _note_one(self, value: Any) -> Iterable[Any]:
        """Note what a value holds; gives what is to be looked at further."""
        kind = type(value)
        if issubclass(kind, tuple):
            return tuple.__iter__(value)
        if kind is FunctionType:
            if is_library(home_of(value)):
                return ()
            kept = value.__dict__, value.__defaults__, value.__kwdefaults__
            return [*kept, *(value.__closure__ or ())]
        if kind is MethodType:
            return (value.__func__, value.__self__)
        # such as the append() of a list, as a hook
        if kind is BuiltinFunctionType:
            return (value.__self__,)
        if kind is CACHE:
            return (value.__wrapped__,)
        if kind is CellType:
            held = _attributes(value)
            self._places[id(value)] = _CachePlace(value, held)
            return held.values()
        if issubclass(kind, type):
            return self._note_class(value) if home_of(value) in self._homes else ()
        if (note := noted_container(value)) is not None:
            if len(note.items) > _MOST_ITEMS and "__name__" not in note.items:
                return ()
            self._places[id(value)] = _CachePlace(value, note)
            return [each for _, each in entries(note.items)]
        if not is_library(home_of(kind)) or home_of(kind) in _HOLDING:
            space = instance_attributes(value)
            if (note := noted_container(space)) is not None:
                # where attributes stand in the object itself, the collector shows that
                self._places[id(space)] = self._places[id(value)] = _CachePlace(space, note)
                return [*space.values()]
        return ()

    def _note_class(self, cls: type) -> Iterable[Any]:
        held = _attributes(cls)
        # the collector shows the dict of a class, and nobody else does
        for space in gc.get_referents(cls):
            if type(space) is dict and "__module__" in space:
                self._places[id(space)] = _CachePlace(cls, held)
        return held.values()


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the functions that a module holds, and the hooks of it and of its parameters."""
    for name, value in vars(module).items():
        if type(value) in (FunctionType, MethodType):
            yield value
        # other libraries have lists of hooks
        elif name.endswith("_hooks") and isinstance(value, dict):
            yield from value.values()
    with without_functions():
        for parameter in module._parameters.values():
            if parameter is not None:
                yield from (hooks_of(parameter) or {}).values()


def _attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes of a class, or the value of a closure's variable."""
    if type(holder) is not CellType:
        return dict(type.__dict__["__dict__"].__get__(holder))
    try:
        return {"cell_contents": holder.cell_contents}
    except ValueError:
        # it has no value
        return {}


def _write(holder: Any, key: Any, value: Any) -> None:
    if is_a(holder, dict):
        dict.__setitem__(holder, key, value)
    elif is_a(holder, type):
        type.__setattr__(holder, key, value)
    else:
        holder.cell_contents = value


def _remove(holder: Any, key: Any) -> None:
    if is_a(holder, dict):
        dict.__delitem__(holder, key)
    elif is_a(holder, type):
        type.__delattr__(holder, key)
    else:
        del holder.cell_contents
