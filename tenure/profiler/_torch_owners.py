"""What torch keeps to itself about who else uses a storage, and a test of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import UntypedStorage

_C: Any = torch._C
_REDUCTIONS = "torch.multiprocessing.reductions"


def n_owners(storage: UntypedStorage) -> int:
    """How many tensors and other owners in C++ share a storage; its Python object is none."""
    return int(_C._storage_Use_Count(storage._cdata)) - 1


def shared_keys() -> frozenset[int]:
    """The storages that this process got from, or gave to, another one through torch."""
    reductions: Any = sys.modules.get(_REDUCTIONS)
    if reductions is None:
        return frozenset()
    return frozenset(ref.cdata for ref in list(reductions.shared_cache.values()))


def works() -> bool:
    """Whether a storage counts its tensors, and a shared one is known by the same number."""
    from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

    t = torch.ones(1, device="cpu")
    storage, view = t.untyped_storage(), t.view(1)
    cache: Any = shared_cache
    counts = n_owners(storage) == len((t, view))
    return counts and hasattr(cache, "values") and StorageWeakRef(storage).cdata == storage._cdata
