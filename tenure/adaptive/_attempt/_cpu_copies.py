"""Tensors of a device, copied to the CPU so that those which share memory share it there too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tenure._storages import storages_of
from tenure._torch.storages import key_of

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 16  # the largest element, complex128


def cpu_copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """A copy on the CPU of each; of tensors whose memory overlaps, views of one copied memory.

    That goes for plain strided tensors without a graph. Of all others, such as those that need
    gradients, each has a copy of its own.
    """
    copies: dict[int, Tensor] = {}
    for group in _overlapping(filter(_can_share, tensors)):
        if len(group) > 1:
            copies.update(zip(map(id, group), _copied_as_one(group), strict=True))
    return [copies[id(each)] if id(each) in copies else _copied(each) for each in tensors]


def shows_one_memory(tensor: Tensor) -> bool:
    """Whether it is strided and has a storage: no wrapper, neither a subclass nor functorch's."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and bool(storages_of(tensor))


def _can_share(tensor: Tensor) -> bool:
    return (
        shows_one_memory(tensor)
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def _overlapping(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors, by the bytes of a storage from the first to the last element of each."""
    by_storage: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_storage[key_of(tensor.untyped_storage())].append(tensor)
    for sharing in by_storage.values():
        group: list[Tensor] = []
        end = 0
        for tensor in sorted(sharing, key=lambda each: _span_of(each)[0]):
            first, last = _span_of(tensor)
            if group and first >= end:
                yield group
                group = []
            group.append(tensor)
            end = max(end, last)
        yield group


def _span_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    offset, n_bytes = int(tensor.storage_offset()), tensor.itemsize
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return offset * n_bytes, (offset + reach + 1) * n_bytes


def _copied_as_one(group: list[Tensor]) -> list[Tensor]:
    start = min(_span_of(each)[0] for each in group) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    end = max(_span_of(each)[1] for each in group)
    with torch.inference_mode(False), torch.no_grad():
        on_device = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        on_device.set_(group[0].untyped_storage(), start, (end - start,), (1,))
        memory = on_device.to(_CPU).untyped_storage()
    return [_view_of(memory, each, start) for each in group]


def _view_of(memory: torch.UntypedStorage, tensor: Tensor, start: int) -> Tensor:
    """What the tensor is in its storage, in memory that begins at another byte of it."""
    with torch.inference_mode(_is_inference_copy(tensor)), torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype)
        offset = tensor.storage_offset() - start // tensor.itemsize
        return view.set_(memory, offset, tensor.shape, tensor.stride())


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that counts its versions if the tensor does, also in inference mode."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return tensor.to(_CPU)
    return tensor.to(_CPU)


def _is_inference_copy(tensor: Tensor) -> bool:
    return torch.is_inference_mode_enabled() and tensor.is_inference()
