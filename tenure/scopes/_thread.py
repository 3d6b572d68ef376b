"""What one thread knows of its scopes: which are open, what has been counted, what it refuses.

A scope belongs to the thread that opened it, and a tensor to one scope at the most. The open scopes
of all the asyncio tasks of a thread stand in one list, so that every tensor's owner can be found.
Every check speaks before anything has changed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary, ref

from torch import Tensor

from tenure._errors import ScopeUsageError

from ._disposed import Cause
from ._ledger import OPEN, Ledger, Reference, enter, n_alive, owns, prune, take
from ._library_objects import install_hooks
from ._tracker import Tracker

if TYPE_CHECKING:
    from ._scope import DisposeScope

# entries that are not worth pruning
_SMALL = 64
ONE_BLOCK = "A scope is neither reusable nor reentrant: make a new one with NewDisposeScope()."
_ONE_THREAD = (
    "A scope is used on the thread that opened it: hand a tensor over with detach_from_scope() "
    "there and attach_to_scope() here."
)


class ThreadScopes:
    """The open scopes of one thread and its counters."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self.tracker = Tracker()
        # by identity, in the order of opening: those of all tasks
        self.open: dict[int, DisposeScope] = {}
        # no longer owned; known only so that `live` can count them and `attach` count them back
        self.handed_out: Ledger = {}
        # what was attached by name, and so is let go whoever holds it
        self.chosen: Ledger = {}
        self._next_prune = _SMALL
        # disposals that an operation of torch, which may need the handle, has put off
        self.waiting: list[tuple[Reference, Cause]] = []
        self.attached = self.detached = self.disposed = self.disposed_outside = 0
        self.counts_at_reset: dict[str, int] = {}
        _all_threads[id(self)] = self

    def owner_of(self, tensor: Tensor) -> DisposeScope | None:
        """Return the open scope of this thread that owns ``tensor``."""
        # the newest first: a tensor is mostly asked for where it was made
        for scope in reversed(list(self.open.values())):
            if owns(scope._ledger, tensor):
                return scope
        return None

    def hand_out(self, reference: Reference) -> None:
        """Note that a tensor has no owner from now on."""
        self.detached += 1
        enter(self.handed_out, reference)
        self._prune()

    def adopt(self, tensor: Tensor) -> Reference:
        """Return a tensor without an owner gets one, which is to enter the reference."""
        self.attached += 1
        return take(self.handed_out, tensor) or ref(tensor)

    def choose(self, reference: Reference) -> None:
        """Note that a caller asked a scope to free this tensor."""
        enter(self.chosen, reference)
        self._prune()

    def _prune(self) -> None:
        """Forget the dead, once the books have doubled."""
        if len(self.handed_out) + len(self.chosen) >= self._next_prune:
            prune(self.handed_out)
            prune(self.chosen)
            self._next_prune = max(_SMALL, 2 * (len(self.handed_out) + len(self.chosen)))

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Detach those of ``tensors`` that a scope owns."""
        if not self.open:
            return
        # an optimizer's step releases its whole state: the keys in common are few, and found in C
        ids = {id(tensor): tensor for tensor in tensors}
        for scope in list(self.open.values()):
            for key in ids.keys() & scope._ledger.keys():
                reference = take(scope._ledger, ids[key])
                if reference is not None:
                    self.hand_out(reference)

    def n_owned(self) -> int:
        """Return how many tensors its scopes own."""
        return sum(n_alive(scope._ledger) for scope in list(self.open.values()))

    def counts(self) -> dict[str, int]:
        """Return the counters since the thread began, by name."""
        created = self.tracker.created
        gone = created + self.attached - self.detached - self.disposed - self.n_owned()
        return {
            "created_in_scope": created,
            "disposed_in_scope": self.disposed,
            "released_in_scope": gone,
            "attached_to_scope": self.attached,
            "detached_from_scope": self.detached,
            "disposed_outside_scope": self.disposed_outside,
        }


class _Local(threading.local):
    scopes: ThreadScopes | None = None


_local = _Local()
# A dictionary gives a list of its references in one go; a set of them is walked step by step, and a
# thread that begins meanwhile would change its size.
_all_threads: WeakValueDictionary[int, ThreadScopes] = WeakValueDictionary()


def this_thread() -> ThreadScopes:
    """Return the scopes of the calling thread."""
    scopes = _local.scopes
    if scopes is None:
        _install_hooks_once()
        scopes = _local.scopes = ThreadScopes()
    return scopes


def use_own_scopes() -> None:
    """Give the calling thread scopes, but install no hooks for optimizers and other libraries."""
    _local.scopes = ThreadScopes()


@functools.cache
def _install_hooks_once() -> None:
    install_hooks(lambda tensors: this_thread().release(tensors))


# --- what is refused


def check_open(scope: DisposeScope, call: str) -> None:
    """Make sure that ``scope`` is open and used on its own thread.

    Raises:
        ScopeUsageError: it is not.
    """
    if scope._status is not OPEN:
        raise ScopeUsageError(
            f"{call}() was called on {scope!r}. Use a scope inside its with block. {ONE_BLOCK}"
        )
    check_thread(scope, call)


def check_thread(scope: DisposeScope, call: str) -> None:
    """Make sure that ``scope`` is used on the thread that opened it.

    Raises:
        ScopeUsageError: it is not.
    """
    if scope._thread is not _local.scopes:
        raise ScopeUsageError(
            f"{call}() was called on {scope!r} from thread {threading.current_thread().name!r}. "
            f"Nothing was changed. {_ONE_THREAD}"
        )


def check_not_foreign(tensors: Iterable[Tensor], call: str) -> None:
    """Make sure that no scope of another thread owns one of ``tensors``.

    Raises:
        ScopeUsageError: one does.
    """
    mine = this_thread()
    for reference in _all_threads.valuerefs():
        thread = reference()
        if thread is None or thread is mine or not thread.open:
            continue
        for tensor in tensors:
            if (owner := thread.owner_of(tensor)) is not None:
                raise ScopeUsageError(
                    f"{call}() got a tensor of {owner!r}, of another thread. {_ONE_THREAD}"
                )


# --- what has been counted


class ScopeStatistics:
    """The counters of one thread, always up to date.

    Attributes:
        created_in_scope: tensors made while a scope was current, and owned by it.
        disposed_in_scope: tensors disposed while a scope owned them, or by its end.
        released_in_scope: tensors that died of their own accord (by reference counting) while a
            scope owned them.
        attached_to_scope: tensors without an owner that got one.
        detached_from_scope: tensors that went on without an owner.
        disposed_outside_scope: tensors disposed that no scope owned.
        live: tensors, of those a scope of this thread owns or handed out, that are alive now.

    Source: the thread statistics of TorchSharp's dispose scopes; its disposed count is the sum of
    disposed and released here, because Python counts references.
    """

    created_in_scope: int
    disposed_in_scope: int
    released_in_scope: int
    attached_to_scope: int
    detached_from_scope: int
    disposed_outside_scope: int

    live: int

    def __init__(self, thread: ThreadScopes) -> None:
        self._thread = thread

    def __getattr__(self, name: str) -> int:
        known = ScopeStatistics.__annotations__
        if name not in known:
            raise AttributeError(f"ScopeStatistics has no counter {name!r}; it has {(*known,)}.")
        return self.to_dict()[name]

    def reset(self) -> None:
        """Count from zero again; ``live`` is no counter, and stays."""
        self._thread.counts_at_reset = self._thread.counts()

    def to_dict(self) -> dict[str, int]:
        """Return the counters of this moment, by name."""
        thread, since = self._thread, self._thread.counts_at_reset
        found = {name: count - since.get(name, 0) for name, count in thread.counts().items()}
        return {**found, "live": thread.n_owned() + n_alive(thread.handed_out)}

    def __str__(self) -> str:
        return "; ".join(f"{name}: {count}" for name, count in self.to_dict().items())

    def __repr__(self) -> str:
        return f"<ScopeStatistics {self}>"


def statistics() -> ScopeStatistics:
    """Return the counters of the calling thread.

    Example:
        >>> import torch
        >>> from tenure import NewDisposeScope, statistics
        >>> statistics().reset()
        >>> with NewDisposeScope():
        ...     kept = torch.ones(3) + 1
        >>> counts = statistics()
        >>> counts.created_in_scope, counts.disposed_in_scope, counts.released_in_scope
        (2, 1, 1)
    """
    return ScopeStatistics(this_thread())
