"""Blocks of host memory that were there before anyone looked: found, so that their end is seen.

What only C++ holds (what autograd saved of a graph that is alive already) is not found.
"""

from __future__ import annotations

import warnings

from torch import Tensor, UntypedStorage

from tenure._heap import gradient_of, live_tensors
from tenure._storages import storages_of
from tenure._torch import cpu_allocator as allocator
from tenure._torch.allocations import is_profiling
from tenure._torch.quiet import without_functions
from tenure._torch.storages import key_of


def enter_existing() -> None:
    """Enter the storages of living tensors, and of their gradients, in the allocator's table."""
    if not allocator.is_known() or is_profiling():
        return
    entered: set[int] = set()
    with warnings.catch_warnings(), without_functions():
        warnings.simplefilter("ignore")  # of whatever classes a heap has
        for tensor in live_tensors():
            for storage in _host_storages(tensor):
                if key_of(storage) not in entered:
                    entered.add(key_of(storage))
                    allocator.enter(storage)


def _host_storages(tensor: Tensor) -> list[UntypedStorage]:
    """Those that the allocator frees: not what numpy owns, nor what is mapped or shared."""
    try:
        own = [s for s in storages_of(tensor) if s.device.type == "cpu" and _is_freed(s)]
        if allocator.is_lazily_copied(tensor):  # to ask for its address would copy it
            own = []
        gradient = gradient_of(tensor)
    except Exception:  # a broken tensor has nothing to enter, and must not end the search
        return []
    return own if gradient is None else own + _host_storages(gradient)


def _is_freed(storage: UntypedStorage) -> bool:
    return bool(storage.resizable()) and not storage.is_shared()
