"""Making device tensors and looking at their memory in another way.

Views share the storage and allocate nothing; `empty` and `empty_strided` are the only factories
that reach the device, all others are built on them by torch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._device._blocks import allocate_bytes
from .._device._which import index_of
from .._torch_backend import (
    cpu_keys,
    kernel,
    operator_named,
    required_elements,
    set_geometry,
    tensor_over,
)


@kernel("empty.memory_format")
def empty(
    size: Sequence[int], *, memory_format: torch.memory_format | None = None, **options: Any
) -> torch.Tensor:
    """Allocate a tensor whose bytes are undefined."""
    order = memory_format or torch.contiguous_format
    shape = torch.empty(size, device="meta", memory_format=order)
    return _new(size, shape.stride(), **options)


def _new(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **unused: Any,
) -> torch.Tensor:
    """Allocate a tensor whose bytes are undefined, with these strides."""
    element = dtype or torch.get_default_dtype()
    n_bytes = required_elements(size, stride) * element.itemsize
    return tensor_over(allocate_bytes(n_bytes, index_of(device)), element, size, stride, 0)


kernel("empty_strided")(_new)


@kernel("_efficientzerotensor")
def zeros(size: Sequence[int], **options: Any) -> torch.Tensor:
    """Return real zeros, since a lazy one has no memory."""
    return torch.zeros(size, **options)


@kernel("set_.source_Tensor")
def set_to_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Share the memory and the geometry of `source`."""
    geometry = (source.size(), source.stride(), source.storage_offset())
    return set_geometry(tensor, source.untyped_storage(), *geometry)


# Their CPU kernels only compute a geometry, so they serve every device.
for _name in (
    "alias",
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
):
    kernel(_name)(functools.partial(operator_named(_name).redispatch, cpu_keys()))
