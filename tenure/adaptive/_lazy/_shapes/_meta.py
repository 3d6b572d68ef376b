"""What is known of a tensor without its data.

Invariant: equal ones are the same object, and none holds a tensor of the user's.
"""

from __future__ import annotations

from typing import Any

import torch

from .._label import Label
from .._tape import BatchInt

_MANY = 8192


class Meta:
    """What is known of a tensor without its data; the same object for equal ones.

    Attributes:
        shape: its sizes.
        stride: how its elements lie.
        dtype: its type.
        device: where it is.
        requires_grad: whether it does.
        is_leaf: whether it was not computed.
        label: where it has the samples.
        size: its shape, with sizes that know how they depend on the batch.
    """

    __slots__ = (
        "device", "dtype", "is_leaf", "label", "requires_grad", "shape", "size", "stride",
    )  # fmt: skip

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        is_leaf: bool,
        label: Label,
    ) -> None:
        self.shape, self.stride, self.dtype, self.device = shape, stride, dtype, device
        self.requires_grad, self.is_leaf, self.label = requires_grad, is_leaf, label
        sizes = list(shape)
        if label.is_batch:
            sizes[label.dim] = BatchInt(sizes[label.dim], label.size)
        self.size = torch.Size(sizes)

    def like(self, label: Label) -> Meta:
        """The same with another label."""
        return _interned(
            self.shape, self.stride, self.dtype, self.device, self.requires_grad, self.is_leaf,
            label,
        )  # fmt: skip

    def requiring(self, requires_grad: bool) -> Meta:
        """The same where it does or does not require grad."""
        return _interned(
            self.shape, self.stride, self.dtype, self.device, requires_grad, self.is_leaf,
            self.label,
        )  # fmt: skip


_metas: dict[Any, Meta] = {}


def _interned(*parts: Any) -> Meta:
    found = _metas.get(parts)
    if found is None:
        if len(_metas) > _MANY:
            _metas.clear()
        found = _metas[parts] = Meta(*parts)
    return found


def meta_of(tensor: Any, label: Label) -> Meta:
    """What a tensor, or one without data, is."""
    return _interned(
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
        tensor.is_leaf, label,
    )  # fmt: skip
