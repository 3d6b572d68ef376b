"""What is answered without being recorded: questions that need no data, and those that want it all.

Invariant: what Python is told of a recorded tensor is what plain PyTorch would tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from ._backward import backward, backward_of, refuse_grad
from ._evaluate import value_of
from ._handle import Handle, refuse_own_function
from ._meta import meta_of, names
from ._recording import record


def _size(self: Handle, dim: int | None = None) -> Any:
    return self._meta.size if dim is None else self._meta.size[dim]


def _numel(self: Handle) -> int:
    # of sizes that know how they depend on the batch
    return math.prod(self._meta.size)


def _stride(self: Handle, dim: int | None = None) -> Any:
    return self._meta.stride if dim is None else self._meta.stride[dim]


def _on_value(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _computed(each) for name, each in kwargs.items()}
        return function(*[_computed(each) for each in args], **named)

    return call


def _computed(value: Any) -> Any:
    return value_of(value).detach() if isinstance(value, Handle) else value


def _refused(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise AdaptiveUsageError(
            f"{name}() of a tensor of lazy() is not there: it wants the gradient of the whole "
            "batch. Nothing was recorded. Use a plain tensor in the function that step() runs."
        )

    return call


def _retain_grad(self: Handle) -> None:
    leaf = self._tape.home().leaves.get(self._number)
    if leaf is None or not self._is_given:
        _refused("retain_grad")()
    elif leaf.origin is not None:
        leaf.origin.retain_grad()


def _requires_grad_(self: Handle, requires_grad: bool = True) -> Any:
    tape = self._tape.home()
    if not self._is_given or self._number in tape.written:
        return record(Tensor.requires_grad_, (self, requires_grad), {})
    if any(self._number in entry.reads for entry in tape.entries):
        raise AdaptiveUsageError(
            "requires_grad_() of a tensor of lazy() that calls were recorded of: call it before "
            "them."
        )
    leaf = tape.leaves[self._number]
    leaf.value.requires_grad_(requires_grad)
    self._become(meta_of(leaf.value, self._meta.label))
    return self


def _gradient(self: Handle) -> Any:
    """Return the gradient of a tensor that was given; what was computed keeps none."""
    leaf = self._tape.home().leaves.get(self._number) if self._is_given else None
    if leaf is not None:
        return (leaf.value if leaf.origin is None else leaf.origin).grad
    if self._meta.is_leaf and self._meta.requires_grad:
        raise AdaptiveUsageError(
            "The gradient of a tensor that was computed of one of lazy() is not kept. Use step()."
        )
    return None


ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.size: _size,
    Tensor.numel: _numel,
    Tensor.nelement: _numel,
    torch.numel: _numel,
    Tensor.stride: _stride,
    Tensor.dim: lambda self: len(self._meta.shape),
    Tensor.ndimension: lambda self: len(self._meta.shape),
    Tensor.__len__: lambda self: int(self._meta.shape[0]),
    Tensor.backward: backward,
    torch.autograd.backward: backward_of,
    torch.autograd.grad: refuse_grad,
    Tensor.requires_grad_: _requires_grad_,
    Tensor.requires_grad.__set__: _requires_grad_,  # type: ignore[attr-defined]
    Tensor.register_hook: _refused("register_hook"),
    Tensor.register_post_accumulate_grad_hook: _refused("register_post_accumulate_grad_hook"),
    Tensor.retain_grad: _retain_grad,
    Tensor.is_floating_point: lambda self: self._meta.dtype.is_floating_point,
    Tensor.__contains__: lambda self, element: _computed(element) in value_of(self),
    torch.is_floating_point: lambda self: self._meta.dtype.is_floating_point,
}


for _name in names(
    """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__
    __dlpack__ __dlpack_device__ data_ptr untyped_storage storage storage_offset is_shared
    is_pinned equal allclose __hex__ __oct__
    """
):
    if hasattr(Tensor, _name):
        ANSWERS[getattr(Tensor, _name)] = _on_value(getattr(Tensor, _name))


def _grad_fn(self: Handle) -> Any:
    # hooks of modules look for their own function here
    refuse_own_function(self)
    return None if self._meta.is_leaf else Recorded(self)


class Recorded:
    """Stands for the node of autograd that a recorded tensor will have."""

    def __init__(self, tensor: Handle) -> None:
        self._what = repr(tensor)

    def name(self) -> str:
        """Return the same of all: which function of autograd it will be is known when it runs."""
        return "recorded"

    def __repr__(self) -> str:
        return f"<node of {self._what}>"


PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda self: self._meta.size,
    "dtype": lambda self: self._meta.dtype,
    "device": lambda self: self._meta.device,
    "requires_grad": lambda self: self._meta.requires_grad,
    "is_leaf": lambda self: self._meta.is_leaf,
    "ndim": lambda self: len(self._meta.shape),
    "layout": lambda self: torch.strided,
    "is_cuda": lambda self: self._meta.device.type == "cuda",
    "is_cpu": lambda self: self._meta.device.type == "cpu",
    "is_meta": lambda self: self._meta.device.type == "meta",
    "is_sparse": lambda self: False,
    "is_nested": lambda self: False,
    "is_quantized": lambda self: False,
    "grad": _gradient,
    "_grad": _gradient,
    "grad_fn": _grad_fn,
    "_version": lambda self: 0,
    "_backward_hooks": lambda self: None,
    "names": lambda self: (None,) * len(self._meta.shape),
    "output_nr": lambda self: 0,
}
