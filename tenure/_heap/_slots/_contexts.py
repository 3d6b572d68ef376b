"""The slots of context variables: their values by name, in whichever context they were set.

A context keeps its values in a tree of nodes that only the collector shows. It counts as alive by
itself: the current one of a thread is held by no object.
"""

import contextvars
import gc
from collections.abc import Iterator

from .._static import type_name
from .._words import Root, Slot, Step, Wanted

_INSIDE = Step("", "context")
# what runs in a context of its own, such as a task, is better named by who has it
_IN_CONTEXT = Root("", "context", cost=2)
# by identity: a metaclass may define __hash__ and __eq__
_NODES = frozenset(
    id(cls) for cls in type.__subclasses__(object) if type_name(cls).startswith("hamt")
)


def root_of_context(candidate: object) -> Root | None:
    """How a context is alive by itself; None for anything else."""
    return _IN_CONTEXT if type(candidate) is contextvars.Context else None


def branch_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    """The tree of a context, and of each branch what grows on it."""
    return ((held, _INSIDE) for held in gc.get_referents(holder) if id(type(held)) in _NODES)


def leaf_slots(holder: object, wanted: Wanted) -> Iterator[Slot]:
    """Values, each with its variable behind it, and further nodes, which have none."""
    left = iter(gc.get_referents(holder))
    for held in left:
        if id(type(held)) in _NODES:
            yield held, _INSIDE
        else:
            variable = next(left)
            yield held, _anchored("context variable", variable)


def variable_slots(holder: contextvars.ContextVar[object], wanted: Wanted) -> Iterator[Slot]:
    """The default of a context variable."""
    step = _anchored("default of context variable", holder)
    return ((held, step) for held in gc.get_referents(holder) if held is not holder.name)


def token_slots(holder: contextvars.Token[object], wanted: Wanted) -> Iterator[Slot]:
    """What a token will set its variable back to."""
    yield holder.old_value, Step(".old_value", "attribute")
    yield holder.var, Step(".var", "attribute")


def _anchored(what: str, variable: contextvars.ContextVar[object]) -> Step:
    return Step("", "context", anchor=f"{what} {variable.name}")
