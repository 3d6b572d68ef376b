"""What a chain is made of: roots, steps from an object to what it holds, and how these are spelled.

The words of each kind of holder stand where that is read, as in `_slots` and `_roots`. Everything
here is text and numbers, so that a chain keeps nothing alive.
"""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from ._reading import type_name

FAR = 1 << 20
"""The cost of a variable of torch's, or of copy.deepcopy's: any other name is a better one."""
Key = int | str
# spells the key of the next step, and says who spells the one after it
Namer = Callable[[Key], "tuple[str, Namer | None]"]

# kinds of holders that hold something no longer than the variable that they may be
_BORROWING = frozenset({"view", "autograd", "numpy", "closure"})
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})

# by identity: a metaclass may define __hash__ and __eq__
_PLAIN_KEYS = frozenset(map(id, (str, bytes, int, float, bool, type(None))))
_MAX_KEY_CHARACTERS = 40
# three times, or once more after it was said once
_REPEATED = re.compile(r"(\.\w+(?:\.\w+|\[…\])*?)(?:\1{2,}|\.…\1+)")
_MAX_KEY_ITEMS = 4


class Step(NamedTuple):
    """One step of a chain, from a holder to what it holds.

    Attributes:
        text: what the step adds to the chain, such as ``[3]`` or ``.cache``.
        kind: the kind of holder, as in `Holder.kind`.
        key: the index or name, for the case that the step before spells it.
        anchor: when not empty, the chain starts anew here, and what came before follows the link.
        link: the words between the anchored chain and what holds it.
        namer: how to spell the next step, where it has a key.
        module: the class of the ``nn.Module`` that this step leaves, if it is one.
        whole: what this step leaves spans the same memory, so that it pins nothing more.
        shares: what this step leaves holds the memory only, and not the handle with its graph.
        frozen: what this step leaves is at least as new as what it holds, like a tuple.
        cost: steps that this one counts for when chains are compared.
    """

    text: str = ""
    kind: str = "container"
    key: Key | None = None
    anchor: str = ""
    link: str = ", held by "
    namer: Namer | None = None
    module: str = ""
    whole: bool = False
    shares: bool = False
    frozen: bool = False
    cost: int = 1

    @property
    def borrows(self) -> bool:
        """Whether what a variable holds by this step is gone with the variable."""
        return self.frozen or self.kind in _BORROWING

    def spelled(self, namer: Namer | None) -> tuple[str, Namer | None]:
        """Return the text of a step in a chain, and the namer of the next step."""
        piece, following = self.text, None
        if namer is not None and self.key is not None:
            piece, following = namer(self.key)
        return piece, following or self.namer


class Root(NamedTuple):
    """Where a chain begins: something that is alive by itself.

    Attributes:
        text: its name; empty when the chain is clearer without.
        kind: the kind that a chain has when nothing on it is more telling.
        namer: how to spell the first step.
        running: the root is a local variable of a frame of this thread, or passing.
        passing: the root is of the exception in flight, and all that it leads to is gone after it.
        silent: the root is tenure's own, and no news.
        cost: steps that this root counts for when chains are compared; of a variable of a library
            more than any chain has, because each name of the program says more.
        captured: the root is a variable that an inner function shares.
        held_by: the words behind the chain, if a longer one begins anew here.
    """

    text: str
    kind: str
    namer: Namer | None = None
    running: bool = False
    passing: bool = False
    silent: bool = False
    cost: int = 0
    captured: bool = False
    held_by: str = ""


# an object that is referred to, and how
Slot = tuple[object, Step]
# the identities of the objects whose slots matter
Wanted = Collection[int]
# names the slots of one type; it may name more than is wanted, `slots_of` picks
Reader = Callable[[Any, Wanted], Iterable[Slot]]


def inside(holder: str) -> Step:
    """Return the step out of an object of which only the type is known."""
    return Step(f" (inside a {holder})")


def attribute(key: Key) -> tuple[str, Namer | None]:
    """Spell a key of a namespace as an attribute."""
    return f".{key}", None


def module_attribute(key: Key) -> tuple[str, Namer | None]:
    """Spell a key of an ``nn.Module``'s namespace; its registries do not show."""
    return ("", _registered) if key in _REGISTRIES else (f".{key}", None)


def nothing(key: Key) -> tuple[str, Namer | None]:
    """Leave the next key out."""
    return "", None


def variables(names: tuple[str, ...], prefix: str = "") -> Namer:
    """Spell an index as the variable or argument at that position, and a name as itself."""
    return lambda key: (f": {prefix}{names[key] if isinstance(key, int) else key}", None)


def items(label: str) -> Namer:
    """Spell a key as an item of a labelled sequence or mapping."""
    return lambda key: (f": {label}[{key!r}]", None)


def _registered(key: Key) -> tuple[str, Namer | None]:
    return (f"[{key}]" if str(key).isdigit() else f".{key}"), None


def without_repetitions(name: str) -> str:
    """Return a name with what it repeats said once, as along a linked list or down a tree."""
    return _REPEATED.sub(r"\1.…", name)


def spell_key(key: object) -> str:
    """Return the key as code where its `repr` is the interpreter's own, otherwise its type."""
    if type(key) is tuple and len(key) <= _MAX_KEY_ITEMS:
        inner = ", ".join(map(spell_key, key))
        return f"({inner},)" if len(key) == 1 else f"({inner})"
    if id(type(key)) not in _PLAIN_KEYS:
        return f"<{type_name(type(key))}>"
    text = repr(key)
    return text if len(text) <= _MAX_KEY_CHARACTERS else f"{text[:_MAX_KEY_CHARACTERS]}…"
