"""Making device tensors and looking at their memory in another way.

Views share the storage and allocate nothing; `empty` and `empty_strided` are the only factories
that reach the device, all others are built on them by torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._device._blocks import allocate_bytes, on_host
from .._device._host_memory import POISON, bytes_of
from .._device._machine import machine
from .._device._which import index_of
from .._torch_backend import (
    cpu_keys,
    kernel,
    operator_named,
    required_elements,
    set_geometry,
    tensor_over,
)

# Their CPU kernels only compute a geometry, so they serve every device.
_VIEWS = (
    "alias",
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
)


@kernel
def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Kernel of `aten::empty.memory_format`."""
    order = memory_format or torch.contiguous_format
    shape = torch.empty(size, device="meta", memory_format=order)
    return _new(size, shape.stride(), dtype, index_of(device))


@kernel
def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Kernel of `aten::empty_strided`."""
    return _new(size, stride, dtype, index_of(device))


@kernel
def zeros(size: Sequence[int], **options: Any) -> torch.Tensor:
    """Kernel of `aten::_efficientzerotensor`: real zeros, since a lazy one has no memory."""
    return torch.zeros(size, **options)


def _new(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None, index: int
) -> torch.Tensor:
    element = dtype or torch.get_default_dtype()
    n_bytes = required_elements(size, stride) * element.itemsize
    tensor = tensor_over(allocate_bytes(n_bytes, index), element, size, stride, 0)
    if machine.capture is not None:
        # What the capture writes there comes only with a replay: to read it sooner is loud.
        bytes_of(on_host(tensor)).fill_(POISON)
    return tensor


@kernel
def set_to_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Kernel of `aten::set_.source_Tensor`: share the memory and the geometry of `source`."""
    geometry = (source.size(), source.stride(), source.storage_offset())
    return set_geometry(tensor, source.untyped_storage(), *geometry)


def _on_cpu_keys(name: str) -> Callable[..., Any]:
    operator = operator_named(name)

    @kernel
    def view(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(cpu_keys(), *args, **kwargs)

    return view


KERNELS = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "set_.source_Tensor": set_to_tensor,
    "_efficientzerotensor": zeros,
}


def kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels of this module by operator name."""
    return KERNELS | {name: _on_cpu_keys(name) for name in _VIEWS}
