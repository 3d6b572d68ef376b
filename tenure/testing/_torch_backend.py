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
AUTOCAST_KEY = "AutocastPrivateUse1"


@functools.cache
def cpu_keys() -> Any:
    """Return the dispatch key of kernels of the host."""
    return python_backend.KeySet(python_backend.Key.CPU)


def name_of_privateuse1() -> str | None:
    """Return the name of PrivateUse1 in this process, also by another package; None if unnamed."""
    name: str = python_backend.name_of_privateuse1()
    return None if name == _UNNAMED else name


def sim_device(index: int = 0) -> torch.device:
    """Return a simulated device, `sim:0` where no other is meant."""
    return torch.device(DEVICE_TYPE, index)


def storage_over(
    host: torch.UntypedStorage, low: int, n_bytes: int, device: torch.device
) -> torch.UntypedStorage:
    """Return a storage over some bytes of one of the host, which the caller must keep alive."""
    made: torch.UntypedStorage = python_backend.storage_at(host.data_ptr() + low, device, n_bytes)
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
    keys = python_backend.KeySet(getattr(python_backend.Key, AUTOCAST_KEY))
    return python_backend.without_keys(keys)  # type: ignore[no-any-return]


def operator_named(qualified: str) -> Any:
    """Return the overload object of `aten` named like `addmm` or `set_.source_Tensor`."""
    name, _, overload = qualified.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


_kernels: list[tuple[str, str, Callable[..., Any]]] = []
"""Of each: the operator, the dispatch key, and what runs."""
_libraries: list[torch.library.Library] = []


def kernel(*names: str, keys: Sequence[str] = ("PrivateUse1",)) -> Callable[[Any], Any]:
    """Decorate what runs for operators of `aten`, which `register_kernels` will put into torch.

    Its frames are cut from the traceback of errors that torch or the machine raise.
    """

    def note(run: Callable[..., Any]) -> Callable[..., Any]:
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

        _kernels.extend((name, key, unwound) for name in names for key in keys)
        return unwound

    return note


def register_kernels(fallbacks: dict[str, Callable[..., Any]]) -> None:
    """Put all kernels into torch, and by key what runs for every operator without one."""
    own, others = (torch.library.Library(namespace, "IMPL") for namespace in ("aten", "_"))
    # Kept, for the kernels are unregistered when they die.
    _libraries.extend((own, others))
    for key, run in fallbacks.items():
        others.fallback(run, key)
    # Torch resolves a lazy conjugate or negative by copying; the copy must take it as it is.
    for key in ("Conjugate", "Negative"):
        own.impl("_copy_from", torch.library.fallthrough_kernel, key)
    for name, key, run in _kernels:
        own.impl(name, run, key)
