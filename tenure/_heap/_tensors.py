"""Questions to a tensor of any kind; none runs an operation or code of a subclass, none raises."""

import sys
from typing import Any

import torch

from tenure._storages import storage_bytes
from tenure._torch.quiet import TENSOR_BASE
from tenure._torch.storages import owners_of_storage, uses_of_tensor

from ._collector import instances, tracked_objects
from ._static import is_kind


def _count_cpp_reference() -> int:
    """References to the handle of a tensor that C++ holds too: none on some versions of torch."""
    leaf = torch.ones(1, requires_grad=True)
    leaf.grad = torch.zeros(1)
    return sys.getrefcount(leaf.grad) - sys.getrefcount(torch.zeros(1))


_CPP_REFERENCE = _count_cpp_reference()


def cpp_references(found: object) -> int:
    """References to an object's handle that only C++ knows of: 0 for what is no tensor."""
    is_in_cpp = is_kind(type(found), torch.Tensor) and cpp_uses(found) > 1  # type: ignore[arg-type]
    return _CPP_REFERENCE if is_in_cpp else 0


def live_tensors() -> list[torch.Tensor]:
    """Every tensor with a handle in Python, in the order of the collector."""
    return instances(tracked_objects(), lambda cls: is_kind(cls, torch.Tensor))


def read(t: torch.Tensor, name: str) -> Any:
    """An attribute as the base class has it; None where this kind of tensor has none."""
    # undefined, sparse, nested, fake and functorch tensors raise errors of many types here
    try:
        return getattr(TENSOR_BASE, name).__get__(t)
    except Exception:
        return None


def gradient_of(t: torch.Tensor) -> torch.Tensor | None:
    """The gradient; None for a tensor that gets none, of which reading it warns."""
    gradient: torch.Tensor | None = None
    if read(t, "is_leaf") or read(t, "retains_grad"):
        gradient = read(t, "grad")
    return gradient


def storage_uses(t: torch.Tensor) -> int:
    """How many tensors and other owners share the storage, this tensor among them."""
    try:
        return owners_of_storage(TENSOR_BASE.untyped_storage(t))
    except Exception:
        return 1


def cpp_uses(t: torch.Tensor) -> int:
    """How many owners the tensor has in C++, its Python handle among them."""
    try:
        return int(uses_of_tensor(t))
    except Exception:
        return 1


def spans_storage(t: torch.Tensor) -> bool:
    """Whether the elements of a tensor are as many bytes as its storage."""
    try:
        return int(TENSOR_BASE.numel(t)) * int(TENSOR_BASE.element_size(t)) == storage_bytes(t)
    except Exception:
        return False
