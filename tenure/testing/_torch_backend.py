"""The functions of torch that make a device out of Python, each behind a plain name.

The private names are in `tenure/_torch/python_backend.py`. The functions that replace those of
torch are elsewhere, one module for each purpose: storages, `.data`, backward passes, the
accelerator.

Python kernels are registered here, too. One that raises leaves no reference behind: a C++ kernel's
frame holds no tensor once it has failed, so the Python frames that stand for it must not hold any
through the traceback either.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from tenure._torch import python_backend
from tenure._torch.storages import key_of

DEVICE_TYPE = "sim"
# c10::DeviceType::PrivateUse1, by number:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/headeronly/core/DeviceType.h
DEVICE_TYPE_NUMBER = 20
_UNNAMED = "privateuseone"


@functools.cache
def cpu_keys() -> Any:
    """Return the dispatch key of kernels of the host."""
    return python_backend.KeySet(python_backend.Key.CPU)


def name_of_privateuse1() -> str | None:
    """Return the name of PrivateUse1 in this process, also by another package; None if unnamed."""
    name: str = python_backend.name_of_privateuse1()
    return None if name == _UNNAMED else name


def register_device(module: object, guard: object) -> None:
    """Rename PrivateUse1 to `sim` and make `module` its device module; possible once a process."""
    python_backend.set_up(DEVICE_TYPE, backend_module=module, device_guard=guard)


def sim_device(index: int = 0) -> torch.device:
    """Return a simulated device, `sim:0` where no other is meant."""
    return torch.device(DEVICE_TYPE, index)


def storage_over(host: torch.UntypedStorage, n_bytes: int, index: int = 0) -> torch.UntypedStorage:
    """Return a storage on a device over the bytes of `host`, which the caller must keep alive."""
    pointer = host.data_ptr()
    return _storage_at(pointer, sim_device(index), n_bytes)


def host_storage_over(host: torch.UntypedStorage, low: int, n_bytes: int) -> torch.UntypedStorage:
    """Return a host storage over some bytes of another, which the caller must keep alive."""
    pointer = host.data_ptr() + low
    return _storage_at(pointer, torch.device("cpu"), n_bytes)


def _storage_at(pointer: int, device: torch.device, n_bytes: int) -> torch.UntypedStorage:
    made: torch.UntypedStorage = python_backend.storage_at(pointer, device, n_bytes)
    return made


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | torch.SymInt,
) -> torch.Tensor:
    """Return a tensor over part of a `storage`; size, stride and offset are in elements."""
    return set_geometry(_empty(storage.device.index, dtype), storage, size, stride, offset)


def _empty(index: int, dtype: torch.dtype) -> torch.Tensor:
    if index == 0:
        return python_backend.create_empty_tensor((0,), dtype)  # type: ignore[no-any-return]
    empty: torch.Tensor = torch.ops.aten.view.dtype.redispatch(cpu_keys(), _first_of(index), dtype)
    return empty


@functools.cache
def _first_of(index: int) -> torch.Tensor:
    """Return a tensor without elements on another device than the first.

    `create_empty_tensor` knows index 0 alone, and a tensor may not be set to a storage of another
    device; but DLPack takes whatever index its capsule names.
    """
    capsule = torch.to_dlpack(_empty(0, torch.uint8))
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # DLTensor begins with a pointer and DLDevice's type and index:
    # https://github.com/dmlc/dlpack/blob/v1.0/include/dlpack/dlpack.h
    ctypes.c_int32.from_address(address(capsule, b"dltensor") + 12).value = index
    return from_dlpack(capsule)


def set_geometry(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | torch.SymInt,
) -> torch.Tensor:
    """Point `tensor` at another storage or another part of its own, in place."""
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    pointed: torch.Tensor = set_.redispatch(cpu_keys(), tensor, storage, offset, size, stride)
    return pointed


def required_elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements that a storage needs to hold a tensor of this size and stride at offset 0."""
    if 0 in size:
        return 0
    return 1 + sum((int(n) - 1) * int(step) for n, step in zip(size, stride, strict=True))


def tensor_key(tensor: torch.Tensor) -> int:
    """`key_of` the tensor's storage."""
    return key_of(tensor.untyped_storage())


def below_autocast() -> AbstractContextManager[None]:
    """Context in which operators on the device skip the autocast kernels."""
    keys = python_backend.KeySet(python_backend.Key.AutocastPrivateUse1)
    return python_backend.without_keys(keys)  # type: ignore[no-any-return]


def operator_named(qualified: str) -> Any:
    """Return the overload object of `aten` named like `addmm` or `set_.source_Tensor`."""
    name, _, overload = qualified.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


_libraries: list[torch.library.Library] = []


def kernel(run: Callable[..., Any]) -> Callable[..., Any]:
    """Cut the frames of `run` from the traceback of errors that torch or the machine raise."""

    @functools.wraps(run)
    def unwound(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            failure = error.with_traceback(None)
        del args, kwargs
        try:
            raise failure
        finally:
            # Or the frame and the error would keep each other alive.
            del failure

    return unwound


def register(kernels: dict[str, Callable[..., Any]], key: str = "PrivateUse1") -> None:
    """Register kernels of `aten`, by operator name, for a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    for name, run in kernels.items():
        library.impl(name, run, key)
    # Kept, for the kernels are unregistered when it dies.
    _libraries.append(library)


def register_fallback(run: Callable[..., Any], key: str) -> None:
    """Register what runs for every operator without a kernel of its own."""
    library = torch.library.Library("_", "IMPL")
    library.fallback(run, key)
    _libraries.append(library)
