"""What one thread knows of its scopes: which are open, and what has been counted.

A scope belongs to the thread that opened it, and a tensor to one scope at the most. The open scopes
of all the asyncio tasks of a thread stand in one list, so that every tensor's owner can be found.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

from torch import Tensor

from tenure._torch.modes import is_active, push

from ._deferred import DeferredDisposals
from ._ledger import Ledger, Reference, enter, n_alive, owns, prune, take
from ._library_objects import install_hooks
from ._owners import watch_owners
from ._tracker import Manager

if TYPE_CHECKING:
    from ._block import Block


_SMALL = 64  # entries that are not worth pruning


class World:
    """A stretch of this thread's mode stack that shares one manager.

    A backward hook, for one, runs with an empty stack: the first scope opened there pushes the
    manager anew, and the last one closed takes it off again.
    """

    __slots__ = ("n_scopes", "outer")

    def __init__(self, outer: World | None) -> None:
        self.outer = outer
        self.n_scopes = 0


class ThreadScopes:
    """The open scopes of one thread and its counters."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self.manager = Manager()
        self.open: dict[int, Block] = {}
        self.handed_out: Ledger = {}
        self.chosen: Ledger = {}  # what was attached by name, and so is let go whoever holds it
        self._next_prune = _SMALL
        self.deferred = DeferredDisposals()
        self.attached = self.detached = self.disposed = self.disposed_outside = 0
        self.counts_at_reset: dict[str, int] = {}
        self._first_world = World(None)
        self.world: World | None = None
        _all_threads.add(self)
        _install_hooks_once()

    def enter_world(self) -> World:
        """Make sure that the manager sees what torch does here, for one more scope."""
        world = self.world
        if world is None:
            world = self.world = self._first_world
            push(self.manager)
        elif not is_active(self.manager):
            world = self.world = World(world)
            push(self.manager)
        world.n_scopes += 1
        return world

    def owner_of(self, tensor: Tensor) -> Block | None:
        """The open scope of this thread that owns ``tensor``."""
        for scope in reversed(list(self.open.values())):
            if owns(scope._ledger, tensor):
                return scope
        return None

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


def foreign_owner_of(tensor: Tensor) -> Block | None:
    """The open scope of another thread that owns ``tensor``."""
    mine = this_thread()
    for scopes in list(_all_threads):
        if scopes is not mine and (owner := scopes.owner_of(tensor)) is not None:
            return owner
    return None


@functools.cache
def _install_hooks_once() -> None:
    install_hooks(lambda tensors: this_thread().release(tensors))
    watch_owners()
