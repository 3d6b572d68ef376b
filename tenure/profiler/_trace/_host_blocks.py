"""The sizes of blocks of host memory, which c10 has to keep for the end of a block to be seen.

Blocks that were there before anyone looked are found through their tensors. What only C++ holds
(what autograd saved of a graph that is alive already) is not found.
"""

from __future__ import annotations

import _thread
import warnings

from torch import Tensor, UntypedStorage

from tenure._heap import gradient_of, live_tensors
from tenure._storages import storages_of
from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import is_profiling
from tenure._torch.quiet import without_functions
from tenure._torch.storages import key_of


class BlockSizes:
    """Whether c10 keeps the sizes of what is made outside of sessions.

    Those of a session it keeps anyway. To be told to takes it half a microsecond for each block,
    because it then formats a line about it: so it is told only while something may be made outside.

    Attributes:
        are_kept: whether it has been told to.
    """

    def __init__(self) -> None:
        self.are_kept = False

    def keep_all(self) -> None:
        """Keep those of all blocks that there are, and of all that come."""
        # In this order: a block is entered only in a table that is in use.
        self._keep(True)
        enter_host_blocks()

    def keep_needed(self, is_listened: bool, in_session: bool) -> None:
        """Keep those that a listener may need.

        Args:
            is_listened: whether there is one.
            in_session: whether the thread that asks has a session.
        """
        # `_count` is 0 while no thread beside the first runs: then nothing is made outside of this
        # thread's session.
        self._keep(is_listened and not (in_session and not _thread._count()))

    def keep_none(self) -> None:
        """Leave c10 as it was."""
        self._keep(False)

    def _keep(self, wanted: bool) -> None:
        self.are_kept = wanted
        allocator.keep_sizes(wanted)


def enter_host_blocks() -> None:
    """Enter the storages of living tensors, and of their gradients, in the allocator's table."""
    # While a profiler of the program has this thread, what is entered would seem to be made now.
    if not allocator.is_known() or is_profiling():
        return
    entered: set[int] = set()
    with warnings.catch_warnings(), without_functions():
        # Of whatever classes a heap has: to look at an object may be to ask for what is deprecated.
        warnings.simplefilter("ignore")
        for tensor in live_tensors():
            for storage in _host_storages(tensor):
                if key_of(storage) not in entered:
                    entered.add(key_of(storage))
                    allocator.enter(storage)


def _host_storages(tensor: Tensor) -> list[UntypedStorage]:
    """Those that the allocator frees: not what numpy owns, nor what is mapped or shared."""
    try:
        own = [s for s in storages_of(tensor) if s.device.type == "cpu" and _is_freed(s)]
        # To ask for the address of one that is copied when written to would copy it.
        if allocator.is_lazily_copied(tensor):
            own = []
        gradient = gradient_of(tensor)
    except Exception:  # a broken tensor has nothing to enter, and must not end the search
        return []
    return own if gradient is None else own + _host_storages(gradient)


def _is_freed(storage: UntypedStorage) -> bool:
    return bool(storage.resizable()) and not storage.is_shared()
