"""Collectives over many tensors: small ones are copied together, large ones go as they are.

Invariant: nothing is allocated once it was made, so that running out of memory can only come before
ranks have agreed; and which tensors go together depends on shapes and types alone, which are the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_MOST_BYTES = 25 * 2**20
"""Of a buffer, as of the buckets of DistributedDataParallel."""
_LARGE_BYTES = 4 * 2**20
"""A tensor of so much is worth a collective of its own."""


class Staged:
    """Buffers for tensors of given shapes.

    Args:
        like: tensors of the shapes, types and devices; they are only looked at.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._bunches = list(_bunches(like))
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        lengths: dict[tuple[torch.device, torch.dtype], int] = {}
        for bunch in self._bunches:
            if len(bunch) > 1 or like[bunch[0]].nbytes < _LARGE_BYTES:
                kind = like[bunch[0]].device, like[bunch[0]].dtype
                n_elements = sum(like[i].numel() for i in bunch)
                lengths[kind] = max(lengths.get(kind, 0), n_elements)
        for (device, dtype), n_elements in lengths.items():
            self._buffers[device, dtype] = torch.empty(n_elements, dtype=dtype, device=device)

    def run(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
        """Run a collective over tensors in place.

        Args:
            tensors: of the shapes that were given, large ones contiguous.
            collective: changes a tensor in place.
        """
        with torch.no_grad():
            for bunch in self._bunches:
                self._run([tensors[i] for i in bunch], collective)

    def _run(self, tensors: list[Tensor], collective: Callable[[Tensor], object]) -> None:
        first = tensors[0]
        if len(tensors) == 1 and first.nbytes >= _LARGE_BYTES:
            collective(first)
            return
        buffer = self._buffers[first.device, first.dtype]
        views, start = [], 0
        for tensor in tensors:
            views.append(buffer[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        collective(buffer[:start])
        for view, tensor in zip(views, tensors, strict=True):
            tensor.copy_(view)


def is_in_place(tensor: Tensor) -> bool:
    """Whether a tensor goes without a copy, and has to be contiguous for that."""
    return tensor.nbytes >= _LARGE_BYTES


def _bunches(like: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of the tensors that go together, in an order of their own."""
    open_: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    n_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    for i, tensor in enumerate(like):
        if not tensor.numel():
            continue
        if is_in_place(tensor):
            yield [i]
            continue
        kind = tensor.device, tensor.dtype
        if kind in open_ and n_bytes[kind] + tensor.nbytes > _MOST_BYTES:
            yield open_.pop(kind)
        if kind not in open_:
            open_[kind], n_bytes[kind] = [], 0
        open_[kind].append(i)
        n_bytes[kind] += tensor.nbytes
    yield from open_.values()
