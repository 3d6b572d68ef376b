"""A process group of ranks that are not there: it sends nothing, and no exchange waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tenure._errors import AdaptiveUsageError

from . import refuse

_PURPOSE = "predictions of many ranks"
_HOME = "torch.testing._internal.distributed.fake_pg"


@contextmanager
def fake_ranks(rank: int, n_ranks: int) -> Iterator[None]:
    """A block in which this process is one of many ranks, the others of which do not exist.

    Raises:
        AdaptiveUsageError: the program has a process group.
        MissingTorchNameError: torch has no such group.
    """
    if not dist.is_available() or dist.is_initialized():
        raise AdaptiveUsageError(
            "Ranks can't be predicted in a process that has a process group, or with a torch that "
            "knows none. Ask in a process of its own."
        )
    try:
        # it registers the group with its import, and few programs want it
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        refuse(f"{_HOME}.FakeStore", _PURPOSE)
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
