"""A process group of ranks that are not there: it sends nothing, and no exchange waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from . import refuse
from .patches import Patch

_PURPOSE = "predictions of many ranks"
_HOME = "torch.testing._internal.distributed.fake_pg"


@contextmanager
def fake_ranks(rank: int, n_ranks: int) -> Iterator[None]:
    """Return a block in which this process is one of many ranks, the others of which do not exist.

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
        with _own_chunks.block():
            yield
    finally:
        dist.destroy_process_group()


class _Chunks:
    """The chunks of a tensor, each made when it is asked for, in place of ``torch.chunk``.

    ``fully_shard`` takes two of each parameter's, and a thousand ranks have a thousand.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, i: int) -> Tensor:
        start = i * self._length
        length = min(self._length, self._tensor.shape[self._dim] - start)
        # the first is as long as there is, and what is missing at the end has no shape
        if length > 0 or i == 0:
            return self._tensor.narrow(self._dim, start, length)
        return self._tensor.new_empty(0)


_own_chunks = Patch(
    "torch.distributed.fsdp._fully_shard._fsdp_param", {"_chunk_with_empty": lambda _: _Chunks}
)
