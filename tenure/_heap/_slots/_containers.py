"""The slots of builtin containers and of their subclasses, read by the methods of the builtins."""

import gc
from collections import deque
from collections.abc import Iterator

from .._static import type_name
from .._words import Slot, Step, Wanted

# by identity: a metaclass may define __hash__ and __eq__
_PLAIN_KEYS = frozenset(map(id, (str, bytes, int, float, bool, type(None))))
_MAX_KEY_CHARACTERS = 40
_MAX_KEY_ITEMS = 4


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
    return _members(set.__iter__(holder), wanted)


def frozenset_slots(holder: frozenset[object], wanted: Wanted) -> Iterator[Slot]:
    """Members of a frozen set."""
    return _members(frozenset.__iter__(holder), wanted)


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


def _members(values: Iterator[object], wanted: Wanted) -> Iterator[Slot]:
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
