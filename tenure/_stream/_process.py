"""What is changed in torch while a process follows allocations, and put back after the last.

c10 tells of the end of a block of host memory only if it has kept the block's size. It does so for
blocks that are made in a session, and for all if a flag asks for it. Blocks from before are found
through their tensors; what only autograd's graphs hold is not found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor, UntypedStorage

from tenure._callers import without_warnings
from tenure._heap import gradient_of, instances, tracked_objects
from tenure._storages import storages_of
from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import announce, is_profiling
from tenure._torch.quiet import without_functions
from tenure._torch.storages import key_of


class Process:
    """The followers of this process.

    Args:
        make_way: called on its thread before a profiler of the program begins.

    Attributes:
        lock: held while followers come and go, and sessions are counted.
        n_sessions: on how many threads a session is open.
    """

    def __init__(self, make_way: Callable[[], None]) -> None:
        self._make_way = make_way
        # reentrant: a garbage collection in here may end a profiler
        self.lock = threading.RLock()
        self.n_sessions = 0
        self._n_followers = 0
        self._stop_announcing: Callable[[], None] | None = None

    def open(self) -> None:
        """Prepare torch for one follower more."""
        with self.lock:
            self._n_followers += 1
            if self._n_followers > 1:
                return
            try:
                # in this order: c10 enters a block only if it keeps sizes
                allocator.keep_sizes()
                enter_host_blocks()
                self._stop_announcing = announce(self._make_way)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Leave torch as it was, after the last follower."""
        with self.lock:
            self._n_followers -= 1
            if self._n_followers:
                return
            if self._stop_announcing is not None:
                self._stop_announcing()
                self._stop_announcing = None
            allocator.keep_sizes_as_before()

    def count_session(self, change: int) -> None:
        """Note that this thread has opened a session (1), or ended it (-1)."""
        with self.lock:
            self.n_sessions += change


def enter_host_blocks() -> None:
    """Enter the storages of living tensors, and of their gradients, in the allocator's table."""
    # While a profiler of the program has this thread, what is entered would seem to be made now.
    if not allocator.is_known() or is_profiling():
        return
    entered: set[int] = set()
    # to look at an object of any class may be to ask for what is deprecated
    with without_warnings(), without_functions():
        for tensor in instances(tracked_objects(), Tensor):
            for storage in _host_storages(tensor):
                if key_of(storage) not in entered:
                    entered.add(key_of(storage))
                    allocator.enter(storage)


def _host_storages(tensor: Tensor) -> list[UntypedStorage]:
    """Return the storages that the allocator frees: none of numpy, mapped or shared ones."""
    try:
        own = [s for s in storages_of(tensor) if s.device.type == "cpu" and _is_freed(s)]
        # to ask for the address of one that is copied when written to would copy it
        if allocator.is_lazily_copied(tensor):
            own = []
        gradient = gradient_of(tensor)
    # a broken tensor has nothing to enter, and must not end the search
    except Exception:
        return []
    return own if gradient is None else own + _host_storages(gradient)


def _is_freed(storage: UntypedStorage) -> bool:
    return bool(storage.resizable()) and not storage.is_shared()
