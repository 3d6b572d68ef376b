"""What torch keeps to itself about who else uses a storage, and a test of it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tenure._heap import owners_of_storage

_REDUCTIONS = "torch.multiprocessing.reductions"


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
    counts = owners_of_storage(storage) == len((t, view))
    return counts and hasattr(cache, "values") and StorageWeakRef(storage).cdata == storage._cdata
