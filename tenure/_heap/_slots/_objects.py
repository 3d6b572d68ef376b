"""The slots of what most objects are: instances, classes, tensors and builtin containers.

Attributes are named as such, past properties and ``__getattr__``; containers and their subclasses
are read by the methods of the builtins.
"""

import gc
import threading
import types
from collections import deque
from collections.abc import Iterator

import torch

from tenure._torch.quiet import TENSOR_BASE

from .._static import class_attributes, instance_attributes, is_kind, mro_of, type_name
from .._words import Slot, Step, Wanted, attribute, module_attribute, nothing

# by identity: a metaclass may define __hash__ and __eq__
_PLAIN_KEYS = frozenset(map(id, (str, bytes, int, float, bool, type(None))))
_MAX_KEY_CHARACTERS = 40
_MAX_KEY_ITEMS = 4


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
                except AttributeError:  # a slot that was never set
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
    """Items of a tuple, by index."""
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


def proxy_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    """The mapping behind a read-only proxy."""
    return ((behind, Step()) for behind in gc.get_referents(holder))


def _numbered(values: Iterator[object], wanted: Wanted, *, frozen: bool = False) -> Iterator[Slot]:
    for index, value in enumerate(values):
        if id(value) in wanted:
            yield value, Step(f"[{index}]", key=index, frozen=frozen)


def _members_of_set(values: Iterator[object], wanted: Wanted) -> Iterator[Slot]:
    return ((value, Step(" (a member)")) for value in list(values) if id(value) in wanted)


def spell_key(key: object) -> str:
    """The key as code where its `repr` is the interpreter's own, otherwise its type."""
    if type(key) is tuple and len(key) <= _MAX_KEY_ITEMS:
        inner = ", ".join(map(spell_key, key))
        return f"({inner},)" if len(key) == 1 else f"({inner})"
    if id(type(key)) not in _PLAIN_KEYS:
        return f"<{type_name(type(key))}>"
    text = repr(key)
    return text if len(text) <= _MAX_KEY_CHARACTERS else f"{text[:_MAX_KEY_CHARACTERS]}…"
