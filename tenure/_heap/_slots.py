"""What an object refers to, slot by slot, with the spelling of each slot.

The garbage collector says how many references there are and the readers only name them; so counting
the answers counts references. No code of the objects themselves runs: attributes are named as such,
past properties and ``__getattr__``; containers and their subclasses are read by the methods of the
builtins.
"""

import functools
import gc
import threading
import types
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch

from tenure._torch.quiet import TENSOR_BASE

from . import _code_slots
from ._reading import (
    class_attributes,
    instance_attributes,
    is_array,
    is_kind,
    mro_of,
    of_array,
    referents_of,
    referents_of_array,
    type_name,
)
from ._words import (
    Reader,
    Slot,
    Step,
    Wanted,
    attribute,
    inside,
    module_attribute,
    nothing,
    spell_key,
)


def slots_of(holder: object, wanted: Wanted) -> Iterator[tuple[int, Step]]:
    """Every reference from one object to any of the wanted ones.

    Args:
        holder: any object.
        wanted: identities of the objects that matter.

    Yields:
        The identity of what is referred to and how; "(inside a …)" where no reader has a name.
    """
    left = Counter(key for key in map(id, referents_of(holder)) if key in wanted)
    for value, step in _named_slots(holder, left):
        if left[id(value)] > 0:
            left[id(value)] -= 1
            yield id(value), step
    unnamed = inside(type_name(type(holder)))
    for key in left.elements():
        yield key, unnamed


def _named_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    if not wanted:
        return
    if is_array(holder):
        yield from array_slots(holder, wanted)
    for cls in mro_of(type(holder)):
        reader = _READERS.get(id(cls))
        # an object that is being built or torn down may lack what its type promises
        try:
            yield from reader(holder, wanted) if reader else ()
        except (AttributeError, RuntimeError, ValueError):
            continue


# --- instances, classes, tensors


def instance_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    """Attributes in the instance dictionary and in ``__slots__``."""
    is_module = is_kind(type(holder), torch.nn.Module)
    module = type_name(type(holder)) if is_module else ""
    namer = module_attribute if is_module else attribute
    attributes = instance_attributes(holder)
    yield attributes, Step("", "attribute", namer=namer, module=module)
    for name, value in list(attributes.items()):
        if id(value) in wanted:
            text, following = namer(name)
            yield value, Step(text, "attribute", namer=following, module=module)
    yield from _slots_in_classes(holder, wanted)


def class_slots(holder: type, wanted: Wanted) -> Iterator[Slot]:
    """The dictionary of a class, which only the collector shows."""
    return ((d, Step("", "attribute", namer=attribute)) for d in _dicts_of(holder, wanted))


def thread_local_slots(holder: threading.local, wanted: Wanted) -> Iterator[Slot]:
    """The dictionaries of a `threading.local`: one by thread, and the one that lists them."""
    return ((d, Step("", "thread", namer=nothing)) for d in _dicts_of(holder, wanted))


def tensor_slots(holder: torch.Tensor, wanted: Wanted) -> Iterator[Slot]:
    """What a tensor holds through Python besides its attributes: hooks and its graph node."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "grad_fn"):
        yield getattr(TENSOR_BASE, name).__get__(holder), Step(f".{name}", "attribute")


def _slots_in_classes(holder: object, wanted: Wanted) -> Iterator[Slot]:
    for cls in mro_of(type(holder)):
        for name, descriptor in class_attributes(cls).items():
            if type(descriptor) is types.MemberDescriptorType:
                try:
                    value = descriptor.__get__(holder)
                # a slot that was never set
                except AttributeError:
                    continue
                if id(value) in wanted:
                    yield value, Step(f".{name}", "attribute")


def _dicts_of(holder: object, wanted: Wanted) -> list[dict[str, object]]:
    return [r for r in gc.get_referents(holder) if type(r) is dict and id(r) in wanted]


# --- containers


def list_slots(holder: list[object], wanted: Wanted) -> Iterator[Slot]:
    """Items of a list, by index."""
    return _numbered(list.__iter__(holder), wanted)


def tuple_slots(holder: tuple[object, ...], wanted: Wanted) -> Iterator[Slot]:
    """Items of a tuple, by index; of one that C code is still filling, those that it has."""
    # The collector shows such a tuple, as of `f(*generator)`, and to read an empty place of it ends
    # the process. It visits what is there, the last first.
    found = gc.get_referents(holder)
    if len(found) != tuple.__len__(holder):
        return _numbered(reversed(found), wanted, frozen=True)
    return _numbered(tuple.__iter__(holder), wanted, frozen=True)


def deque_slots(holder: deque[object], wanted: Wanted) -> Iterator[Slot]:
    """Items of a deque, by index."""
    return _numbered(iter(list(deque.__iter__(holder))), wanted)


def set_slots(holder: set[object], wanted: Wanted) -> Iterator[Slot]:
    """Members of a set."""
    return _members_of_set(set.__iter__(holder), wanted)


def frozenset_slots(holder: frozenset[object], wanted: Wanted) -> Iterator[Slot]:
    """Members of a frozen set."""
    return _members_of_set(frozenset.__iter__(holder), wanted)


def dict_slots(holder: dict[object, object], wanted: Wanted) -> Iterator[Slot]:
    """Values of a dictionary, by key, and its keys."""
    for key, value in list(dict.items(holder)):
        if id(value) in wanted:
            name = spell_key(key)
            yield value, Step(f"[{name}]", key=key if type(key) is str else name)
        if id(key) in wanted:
            yield key, Step(" (a key)")


def array_slots(holder: Any, wanted: Wanted) -> Iterator[Slot]:
    """Items of an array of objects, by index, or the array that it is a view of."""
    base = of_array(holder, "base")
    for index, value in enumerate(referents_of_array(holder)):
        if id(value) in wanted:
            yield value, Step(".base" if value is base else f".flat[{index}]")


def _numbered(values: Iterator[object], wanted: Wanted, *, frozen: bool = False) -> Iterator[Slot]:
    for index, value in enumerate(values):
        if id(value) in wanted:
            yield value, Step(f"[{index}]", key=index, frozen=frozen)


def _members_of_set(values: Iterator[object], wanted: Wanted) -> Iterator[Slot]:
    return ((value, Step(" (a member)")) for value in list(values) if id(value) in wanted)


# --- who reads what


# by identity: a metaclass may define __hash__ and __eq__
_READERS: dict[int, Reader] = {
    id(cls): reader
    for cls, reader in (
        (list, list_slots),
        (tuple, tuple_slots),
        (deque, deque_slots),
        (set, set_slots),
        (frozenset, frozenset_slots),
        (dict, dict_slots),
        (object, instance_slots),
        (type, class_slots),
        (threading.local, thread_local_slots),
        (torch.Tensor, tensor_slots),
        (types.FunctionType, _code_slots.function_slots),
        (types.CellType, _code_slots.cell_slots),
        (types.MethodType, _code_slots.method_slots),
        (types.BuiltinMethodType, _code_slots.method_slots),
        (functools.partial, _code_slots.partial_slots),
        (type(functools.lru_cache(len)), _code_slots.cache_slots),
        (types.GeneratorType, _code_slots.suspended_slots),
        (types.CoroutineType, _code_slots.suspended_slots),
        (types.AsyncGeneratorType, _code_slots.suspended_slots),
        (types.FrameType, _code_slots.frame_slots),
        (types.TracebackType, _code_slots.traceback_slots),
        (BaseException, _code_slots.exception_slots),
    )
}
