"""Many ranks in one process, none of which is there but this one: for predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tenure._errors import AdaptiveUsageError
from tenure._torch import fake_ranks as groups
from tenure._torch.patches import Patch
from tenure._without_data import without_data

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def fake_ranks(
    *shape: int, names: Sequence[str] | None = None, rank: int = 0
) -> Iterator[DeviceMesh]:
    """Return a block in which this process is one of many ranks, to predict what each takes.

    Make the model, shard it over the mesh as your program does (``fully_shard``, with
    ``parallelize_module`` if you like), make the optimizer, and call `predict_peak`. What is made
    in the block has no data, so that a model of any size takes no memory; nothing is sent. A rank
    that is not the first takes as much or less, unless the program has ranks of different kinds.

    Args:
        *shape: how many ranks there are: along each dimension of the mesh.
        names: of these dimensions.
        rank: which of them is predicted.

    Yields:
        The mesh. Its device is the CPU, which stands for the ``device=`` of `predict_peak`.

    Raises:
        AdaptiveUsageError: the program has a process group; or the shape has no ranks, or the rank
            is none of them. In the block: ``DistributedDataParallel`` is made, which needs data.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.distributed.fsdp import fully_shard
        >>> from tenure.adaptive import fake_ranks, predict_peak
        >>> def bytes_on(n_ranks):
        ...     with fake_ranks(n_ranks) as mesh:
        ...         model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
        ...         for module in (*model, model):
        ...             fully_shard(module, mesh=mesh)
        ...         report = predict_peak(lambda x: model(x).sum(), torch.empty(8, 4096))
        ...     return report.peak_bytes
        >>> bytes_on(64) < bytes_on(8)
        True
    """
    n_ranks = math.prod(shape)
    if not shape or n_ranks < 1 or not 0 <= rank < n_ranks:
        raise AdaptiveUsageError(
            f"fake_ranks() got {shape} as its shape and rank {rank}. Give at least one rank, as "
            "fake_ranks(8), and a rank= below that."
        )
    with groups.fake_ranks(rank, n_ranks), _replicas.block():
        from torch.distributed.device_mesh import init_device_mesh

        # a mesh reads its ranks
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names) if names else None)
        with without_data(keeps_names=True, has_rows=True):
            yield mesh


def _refused(_: Any) -> Any:
    def init(*_: Any, **__: Any) -> None:
        raise AdaptiveUsageError(
            "DistributedDataParallel can't be made without data. Each of its ranks takes what one "
            "device takes, and the bytes of all gradients once more: predict the model without it."
        )

    return init


_replicas = Patch("torch.nn.parallel.DistributedDataParallel", {"__init__": _refused})
