"""What one thread knows of its scopes: which are open, and what has been counted.

A scope belongs to the thread that opened it, and a tensor to one scope at the most. The open scopes
of all the asyncio tasks of a thread stand in one list, so that every tensor's owner can be found.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from weakref import WeakSet, ref

from torch import Tensor

from ._disposed import Cause
from ._library_objects import install_hooks
from ._library_state import watch_library_objects
from ._owner import Ledger, Owner, Reference, enter, n_alive, owns, prune, take
from ._tracker import Tracker

_SMALL = 64  # entries that are not worth pruning


class ThreadScopes:
    """The open scopes of one thread and its counters."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self.tracker = Tracker()
        self.open: dict[int, Owner] = {}
        self.handed_out: Ledger = {}
        self.chosen: Ledger = {}  # what was attached by name, and so is let go whoever holds it
        self._next_prune = _SMALL
        # disposals that an operation of torch, which may need the handle, has put off
        self.waiting: list[tuple[Reference, Cause]] = []
        self.attached = self.detached = self.disposed = self.disposed_outside = 0
        self.counts_at_reset: dict[str, int] = {}
        _all_threads.add(self)
        _install_hooks_once()

    def owner_of(self, tensor: Tensor) -> Owner | None:
        """The open scope of this thread that owns ``tensor``."""
        for scope in reversed(list(self.open.values())):
            if owns(scope._ledger, tensor):
                return scope
        return None

    def hand_out_all(self, tensors: Iterable[tuple[Tensor, Reference]]) -> None:
        """All these go on without an owner."""
        for _, reference in tensors:
            self.hand_out(reference)

    def hand_out(self, reference: Reference) -> None:
        """A tensor goes on without an owner."""
        self.detached += 1
        enter(self.handed_out, reference)
        self._prune()

    def adopt(self, tensor: Tensor) -> Reference:
        """A tensor without an owner gets one, which is to enter the reference."""
        self.attached += 1
        return take(self.handed_out, tensor) or ref(tensor)

    def choose(self, reference: Reference) -> None:
        """A caller named this tensor as one that a scope is to let go."""
        enter(self.chosen, reference)
        self._prune()

    def _prune(self) -> None:
        """Forget the dead, once the books have doubled."""
        if len(self.handed_out) + len(self.chosen) >= self._next_prune:
            prune(self.handed_out)
            prune(self.chosen)
            self._next_prune = max(_SMALL, 2 * (len(self.handed_out) + len(self.chosen)))

    def release(self, tensors: list[Tensor]) -> None:
        """Detach those of ``tensors`` that a scope owns."""
        if not self.open or not tensors:
            return
        ids = {id(tensor): tensor for tensor in tensors}
        for scope in list(self.open.values()):
            for key in ids.keys() & scope._ledger.keys():
                reference = take(scope._ledger, ids[key])
                if reference is not None:
                    self.hand_out(reference)

    @property
    def live(self) -> int:
        """How many tensors that its scopes own, or handed out, are alive and not disposed."""
        return self.n_owned + n_alive(self.handed_out)

    @property
    def n_owned(self) -> int:
        """How many tensors its scopes own."""
        return sum(n_alive(scope._ledger) for scope in list(self.open.values()))


class _Local(threading.local):
    scopes: ThreadScopes | None = None


_local = _Local()
_all_threads: WeakSet[ThreadScopes] = WeakSet()


def this_thread() -> ThreadScopes:
    """The scopes of the calling thread."""
    scopes = _local.scopes
    if scopes is None:
        scopes = _local.scopes = ThreadScopes()
    return scopes


def foreign_owner_of(tensor: Tensor) -> Owner | None:
    """The open scope of another thread that owns ``tensor``."""
    mine = this_thread()
    for scopes in list(_all_threads):
        if scopes is not mine and (owner := scopes.owner_of(tensor)) is not None:
            return owner
    return None


@functools.cache
def _install_hooks_once() -> None:
    install_hooks(lambda tensors: this_thread().release(tensors))
    watch_library_objects()
