"""The private torch functions that make a device out of Python, each behind a plain name.

A torch release that moves one of them is mended here, and `test_torch_backend.py` says which one
moved. What replaces a function of torch stands elsewhere, one module for each purpose: storages,
`.data`, backward passes, the accelerator.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._acc import DeviceGuard
from torch._prims_common import compute_required_storage_length
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE_TYPE = "sim"
# c10::DeviceType::PrivateUse1, by number:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/headeronly/core/DeviceType.h
DEVICE_TYPE_NUMBER = 20
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def register_device(module: object, guard: DeviceGuard) -> None:
    """Rename PrivateUse1 to `sim` and make `module` its device module; possible once a process."""
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=module, device_guard=guard)


def sim_device() -> torch.device:
    """The one simulated device, `sim:0`."""
    return torch.device(DEVICE_TYPE, 0)


def storage_over(host: torch.UntypedStorage, n_bytes: int) -> torch.UntypedStorage:
    """A storage on `sim:0` over the bytes of `host`, which the caller must keep alive."""
    pointer = host.data_ptr()
    return torch._C._construct_storage_from_data_pointer(pointer, sim_device(), n_bytes)


def host_storage_over(host: torch.UntypedStorage, low: int, n_bytes: int) -> torch.UntypedStorage:
    """A host storage over some bytes of another, which the caller must keep alive."""
    pointer = host.data_ptr() + low
    return torch._C._construct_storage_from_data_pointer(pointer, torch.device("cpu"), n_bytes)


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """A tensor on `sim:0` over part of `storage`; size, stride and offset are in elements."""
    tensor = torch._C._acc.create_empty_tensor([0], dtype)
    return set_geometry(tensor, storage, size, stride, offset)


def set_geometry(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Point `tensor` at another storage or another part of its own, in place."""
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(CPU_KEYS, tensor, storage, offset, size, stride)


def required_elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements that a storage needs to hold a tensor of this size and stride at offset 0."""
    return int(compute_required_storage_length(size, stride, 0))


def swap_implementation(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what two tensor objects refer to; the objects keep their identity."""
    torch._C._swap_tensor_impl(first, second)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of the storage's C++ object, equal for every Python object over it."""
    return storage._cdata


def tensor_key(tensor: torch.Tensor) -> int:
    """`storage_key` of the tensor's storage."""
    return storage_key(tensor.untyped_storage())


def is_inside_backward() -> bool:
    """Whether this thread is running a node of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def below_autocast() -> AbstractContextManager[None]:
    """Context in which operators on the device skip the autocast kernels."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def operator_named(qualified: str) -> Any:
    """The overload object of `aten` named like `addmm` or `set_.source_Tensor`."""
    name, _, overload = qualified.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")
