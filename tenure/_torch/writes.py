"""Whether a tensor was written: version counters, and torch's copies on write.

A graph refuses its backward pass when a tensor that it saved has another version than then. Values
that are put back exactly as they were deserve the version that they had.

A lazy copy takes memory only when one of the two is written, which moves to other memory then.
Nobody else may have its address: a NumPy array or another tensor over the same storage would still
read the old memory. So only what has a storage to itself is copied like this. And only on the CPU:
on CUDA torch moves the memory on the default stream (``copy_data`` of CUDACachingAllocator.cpp),
and work on another would not wait. Nor may the tensor be resized, after which each write fails
(``COW.cpp``): what observers of quantization resize has one element before, or none.

Source: ``c10::impl::cow`` of PyTorch; ``test_cow_input`` holds that operators read without copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from . import bound, getter
from .quiet import aside
from .storages import n_uses

_ATTEMPTS = "the state of attempts and steps"
counter_of: Callable[[Tensor], int] = getter(
    "torch.Tensor._version", f"{_ATTEMPTS}, paging and Courtesy"
)
"""How often a tensor was written to. Inference tensors, which are not counted, raise."""
_set_counter = bound("torch._C._autograd._unsafe_set_version_counter", _ATTEMPTS)
# an optional gain: without it a RuntimeError in lazy_copy() leads to a copy at once
_lazy_clone = bound("torch._lazy_clone", _ATTEMPTS)
_address = bound("torch._C._data_address", _ATTEMPTS)
_ALONE = 2
"""Uses of a storage with one tensor, while a Python object asks."""


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for inference tensors, uncounted."""
    return None if tensor.is_inference() else counter_of(tensor)


def versions_of(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return `version_of` each, in one call: a model may have thousands of parameters."""
    return [None if each.is_inference() else counter_of(each) for each in tensors]


def write_back(tensor: Tensor, values: Tensor, version: int | None) -> None:
    """Copy values into a tensor that had them when its version was ``version``.

    Source: ``torch.autograd._unsafe_preserve_version_counter``, for a version of the caller's.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)
    if version is not None:
        set_version(tensor, version)


def set_version(tensor: Tensor, version: int) -> None:
    """Let a tensor count as written so often; inference tensors, which are not counted, stay so."""
    if not tensor.is_inference():
        _set_counter((tensor,), (version,))


def writes_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor that counts the writes to another one, and keeps no bytes.

    A detached tensor counts with the first, and goes on so when it is given other memory.
    """
    with aside():
        counting = tensor.detach()
        counting.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counting


def counts_with(tensor: Tensor, other: Tensor) -> bool:
    """Return whether both share a counter of writes; ``x.data`` has a counter of its own."""
    version = version_of(tensor)
    if version is None or version != version_of(other):
        return False
    _set_counter((other,), (version + 1,))
    is_one = counter_of(tensor) == version + 1
    _set_counter((other,), (version,))
    return is_one


def lazy_copy(tensor: Tensor) -> Tensor | None:
    """Return a copy that takes no memory yet, made below all modes; None where that is not safe."""
    # a subclass, a device that is not the CPU, and memory with another user: see above
    if (
        type(tensor) is not Tensor
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_inference()
        or tensor.numel() < 2
        or n_uses(tensor.untyped_storage()) != _ALONE
    ):
        return None
    try:
        copy: Tensor = _lazy_clone(tensor)
    # memory that is shared with other processes, or of another library
    except RuntimeError:
        return None
    return copy


def share_memory(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether a tensor still lies where it did when its lazy copy was made, so is as it was.

    It has moved if it was written, or if its address was taken, which compiled code does.
    """
    return bool(_address(tensor) == _address(copy))
