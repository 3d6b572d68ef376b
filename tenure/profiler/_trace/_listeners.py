"""Who is told what runs and what the allocator does: a line profiler, and whatever else wants to.

A listener has a part on each thread. Before anything that it is told happens, a look is taken: the
part says whose the time since the last look is, and that claim is told what was allocated in it,
as soon as the thread's session is read. So a claim has to know by itself what it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Protocol

from tenure._torch.allocations import Changes

Key = tuple[int, int]
"""A line: the identity of its code, whose hash takes long, and its number."""
Codes = Mapping[int, CodeType]
"""Code objects by identity: their hashes take longer than a line's bookkeeping."""


class Claim(Protocol):
    """Whose the time between two looks is; it is told once what happened in it, in order."""

    def take(self, changes: list[int], level_bytes: int, is_known: bool) -> None:
        """These bytes of host memory were allocated (positive) and freed, one after the other.

        Args:
            changes: often empty.
            level_bytes: what was live at the end.
            is_known: whether that is all threads' doing, and not just the sum of this one's.
        """

    def miss(self, was_bytes: int, level_bytes: int) -> None:
        """What happened can't be told but for the levels at the two ends."""


class ThreadListener(Protocol):
    """A listener's part on one thread; all calls come from that thread.

    Attributes:
        can_wait: whether it is told of host memory alone, which it claims at each look and may be
            told of later. Else it is given the events of every look at once.
        is_active: whether a session is to stay open on this thread.
        is_outdated: whether the listener wants something else than when it was last renewed.
    """

    # Attributes and no properties: they are asked for at each line.
    can_wait: bool
    is_outdated: bool

    @property
    def is_active(self) -> bool: ...

    def renew(self) -> None:
        """Want what the listener wants now."""

    def forget_if_reopened(self) -> None:
        """Know no frame from before, if the listener was closed and opened again since."""

    def start(self) -> None:
        """Count from here: what happened since the last look was nobody's, or has been told."""

    def claim(self) -> Claim | None:
        """Whose the time since the last look is; None where it is nobody's."""

    def account(self, changes: Changes | None) -> None:
        """Take what happened since the last look; None where no session saw it."""

    def pass_by(self) -> None:
        """Take nothing: the events of this thread are told to another."""

    def enter(self, identity: int, key: Key) -> None:
        """A frame of the listener's codes begins, or goes on after a ``yield`` or an ``await``."""

    def line(self, identity: int, key: Key) -> None:
        """Such a frame begins with a line."""

    def leave(self, identity: int, torn_down: bool) -> None:
        """Such a frame ends; with ``torn_down`` what its variables held is freed next."""


class Unread(Protocol):
    """What one thread has claimed and has not been told of yet."""

    def claims(self) -> list[Claim]:
        """Those that more may have happened to than they know; any thread may ask."""
        raise NotImplementedError


class Listener(Protocol):
    """Who is told of all threads, from when it is opened until it is closed.

    Attributes:
        codes: the codes whose frames and lines it is told of; may be none.
    """

    @property
    def codes(self) -> Codes: ...

    def begin(self) -> None:
        """It is about to be told, for the first time or again."""

    def on_thread(self, unread: Unread) -> ThreadListener:
        """Its part on a thread that it has none on, and that has this left to tell."""
        raise NotImplementedError
