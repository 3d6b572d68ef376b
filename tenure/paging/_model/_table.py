"""The tensors of a model by the memory they use, so that what is shared is counted and moved once.

Invariant: each tensor object stands in the table once, under the extent of its storage; tied
parameters, shared modules and views of one storage lie in one extent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tenure._storages import byte_range, inner_tensors, storages_of
from tenure._torch.storages import key_of

from ._units import Extent, HostTensor

# Kernels read whole vectors, and choose their way by the address: a tensor keeps its place modulo
# this, or it would be computed with in another order than by the plain model.
_ALIGNMENT_BYTES = 16
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class TensorTable:
    """The parameters and buffers of a model.

    Args:
        model: the model; each of its modules is read once.

    Attributes:
        hosts: every tensor, by the ``id`` of its object.
        unpaged: tensors that have no plain memory to page: subclasses, sparse and empty ones.
        direct: for each module, the tensors that it registers itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hosts: dict[int, HostTensor] = {}
        self.direct: dict[nn.Module, list[HostTensor]] = {}
        self.unpaged: list[HostTensor] = []
        for prefix, module in model.named_modules():
            self.direct[module] = [
                # A tied weight, as of a language model whose head is its embedding, is one tensor
                # under two names: it keeps the first of them.
                self.hosts.setdefault(id(tensor), HostTensor(tensor, name, is_buffer))
                for name, tensor, is_buffer in _registered(module, prefix)
            ]
        self._extents = self._lay_out()

    @property
    def unpaged_bytes(self) -> int:
        """What copies of the tensors in ``unpaged`` take on a device."""
        return sum(self.unpaged_sizes)

    @property
    def unpaged_sizes(self) -> list[int]:
        """The bytes of each block of such copies."""
        return [n_bytes for host in self.unpaged for n_bytes in sizes_of_unpaged(host.tensor)]

    def extents_of(self, modules: Iterable[nn.Module]) -> list[Extent]:
        """The extents that the modules themselves use, in the order of their registration."""
        found = {
            id(extent): extent
            for module in modules
            for host in self.direct[module]
            if (extent := self._extents.get(id(host.tensor))) is not None
        }
        return list(found.values())

    def _lay_out(self) -> dict[int, Extent]:
        by_storage: dict[int, list[HostTensor]] = {}
        for host in self.hosts.values():
            if is_plain(host.tensor):
                # Views of one storage, as the parts of a fused projection are, must keep their
                # distance: whoever writes through one of them is seen through the others.
                by_storage.setdefault(key_of(host.tensor.untyped_storage()), []).append(host)
            else:
                self.unpaged.append(host)
        extents = map(_extent, by_storage.values())
        return {id(host.tensor): extent for extent in extents for host in extent.tensors}


def is_plain(tensor: Tensor) -> bool:
    """Whether its bytes in a storage are all there is to it."""
    return (
        # A subclass may be made of several tensors, as quantized weights are, or mean something
        # else by its bytes; a conjugated one is the bytes of another.
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def sizes_of_unpaged(tensor: Tensor) -> list[int]:
    """The bytes of each block that a copy of a tensor takes which is not plain."""
    # Each of the tensors inside is a block of the allocator, and rounded by itself.
    inside = inner_tensors(tensor)
    if inside:
        return [n_bytes for each in inside for n_bytes in sizes_of_unpaged(each)]
    return [storage.nbytes() for storage in storages_of(tensor)] if tensor.numel() else []


def _registered(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, bool]]:
    dot = f"{prefix}." if prefix else ""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield dot + name, parameter, False
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield dot + name, buffer, True


def _extent(hosts: list[HostTensor]) -> Extent:
    ranges = [byte_range(host.tensor) for host in hosts]
    low = min(start for start, _ in ranges) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    high = max(end for _, end in ranges)
    for host, (start, _) in zip(hosts, ranges, strict=True):
        host.at_bytes = start - low
    return Extent(low, high - low, hosts)
