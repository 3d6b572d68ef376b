"""Local variables of every running frame, by the identity of their values.

Reading leaves nothing behind: a frame's ``f_locals`` snapshot, which would prolong the life of
what it shows, is emptied again unless somebody else holds it.
"""

import inspect
import sys
import threading
from collections import defaultdict
from types import FrameType
from typing import NamedTuple

from tenure._callers import is_tenure

from ._fast_locals import forget
from ._static import type_name

# references to a snapshot that only its frame, our variable and the argument of getrefcount hold
_UNSHARED = 3


class Variable(NamedTuple):
    """A name in a running frame that is bound to some object."""

    text: str
    is_cell: bool
    thread: str | None
    silent: bool
    is_asking: bool


class RunningFrames:
    """The frames of all threads; of this one, those from a given frame outwards.

    Frames of tenure at the inner end of this thread's stack are silent: they are who is asking.

    Args:
        innermost: where this thread's stack begins; frames that it called are not looked at.
    """

    def __init__(self, innermost: FrameType | None) -> None:
        # of the frames, and of dictionaries that are the variables of one
        self.ids: set[int] = set()
        self.variables: defaultdict[int, list[Variable]] = defaultdict(list)
        self._add_stack(innermost, thread=None)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        others = sys._current_frames()
        # our own frame in a variable of ours would be a cycle, and keep the whole stack alive
        del others[threading.get_ident()]
        for ident, frame in others.items():
            self._add_stack(frame, thread=names.get(ident, str(ident)))

    def count(self, identity: int) -> int:
        """How many references an object gets from plain (not captured) local variables."""
        return sum(not variable.is_cell for variable in self.variables.get(identity, ()))

    def count_silent(self, identity: int) -> int:
        """How many of these are of tenure's own functions."""
        found = self.variables.get(identity, ())
        return sum(variable.is_asking and not variable.is_cell for variable in found)

    def _add_stack(self, frame: FrameType | None, thread: str | None) -> None:
        silent = thread is None
        while frame is not None:
            silent = silent and is_tenure(frame)
            self.ids.add(id(frame))
            if not _is_namespace(frame):
                self._add_frame(frame, thread, silent)
            frame = frame.f_back

    def _add_frame(self, frame: FrameType, thread: str | None, silent: bool) -> None:
        if not _is_optimized(frame):
            # the body of a class: its dictionary is the variables and not one more holder
            self.ids.add(id(frame.f_locals))
        cells = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
        for name, value in read_locals(frame):
            text = _spell(frame, name, value)
            # the compiler's own variables, such as the iterator of a comprehension, are no names
            is_silent = silent or not name.isidentifier()
            variable = Variable(text, name in cells, thread, is_silent, silent)
            self.variables[id(value)].append(variable)


def read_locals(frame: FrameType) -> list[tuple[str, object]]:
    """Names and values of a frame's local variables, leaving no snapshot behind."""
    snapshot = frame.f_locals
    if type(snapshot) is not dict:
        # from Python 3.13 a proxy; else what a metaclass prepared for the body of a class
        is_mapping = issubclass(type(snapshot), dict)
        return list(dict.items(snapshot) if is_mapping else snapshot.items())
    pairs = list(snapshot.items())
    if _is_optimized(frame) and sys.getrefcount(snapshot) <= _UNSHARED:
        forget(frame, snapshot)
    return pairs


def _is_optimized(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _is_namespace(frame: FrameType) -> bool:
    """Whether the variables of a frame are the globals of its module."""
    return not _is_optimized(frame) and frame.f_locals is frame.f_globals


def _spell(frame: FrameType, name: str, value: object) -> str:
    if name == "self":
        return type_name(type(value))
    scope = frame.f_code.co_qualname
    return f"{scope}.<locals>.{name}" if _is_optimized(frame) else f"{scope}.{name}"
