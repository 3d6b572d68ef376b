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
from ._meta import meta_of, names
from ._recording import record
from ._tape import Handle, refuse_own_function


def _size(self: Handle, dim: int | None = None) -> Any:
    return self._value.meta.size if dim is None else self._value.meta.size[dim]


def _numel(self: Handle) -> int:
    # of sizes that know how they depend on the batch
    return math.prod(self._value.meta.size)


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


def _requires_grad_(self: Handle, requires_grad: bool = True) -> Any:
    value = self._value
    if value.given is None or value.tensor is None:
        return record(Tensor.requires_grad_, (self, requires_grad), {})
    if any(value in entry.reads for entry in self._tape.entries):
        raise AdaptiveUsageError(
            "requires_grad_() of a tensor of lazy() that calls were recorded of: call it before "
            "them."
        )
    value.tensor.requires_grad_(requires_grad)
    self._tape.rewrite(value, meta_of(value.tensor, value.label))
    return self


def _gradient(self: Handle) -> Any:
    """Return the gradient of a tensor that was given; what was computed keeps none."""
    value = self._value
    if value.given is not None:
        return value.given.grad
    if value.meta.is_leaf and value.meta.requires_grad:
        raise AdaptiveUsageError(
            "The gradient of a tensor that was computed of one of lazy() is not kept. Use step()."
        )
    return None


ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.size: _size,
    Tensor.numel: _numel,
    Tensor.nelement: _numel,
    torch.numel: _numel,
    Tensor.dim: lambda self: len(self._value.meta.shape),
    Tensor.backward: backward,
    torch.autograd.backward: backward_of,
    torch.autograd.grad: refuse_grad,
    Tensor.requires_grad_: _requires_grad_,
    Tensor.requires_grad.__set__: _requires_grad_,  # type: ignore[attr-defined]
    Tensor.register_hook: _refused("register_hook"),
    Tensor.register_post_accumulate_grad_hook: _refused("register_post_accumulate_grad_hook"),
    Tensor.retain_grad: _refused("retain_grad"),
    Tensor.__contains__: lambda self, element: _computed(element) in value_of(self),
}


for _name in names(
    """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__
    __dlpack__ __dlpack_device__ data_ptr untyped_storage storage storage_offset is_shared
    is_pinned equal allclose __hex__ __oct__ __format__
    """
):
    if hasattr(Tensor, _name):
        ANSWERS[getattr(Tensor, _name)] = _on_value(getattr(Tensor, _name))


def _grad_fn(self: Handle) -> Any:
    # hooks of modules look for their own function here
    refuse_own_function(self)
    return None if self._value.meta.is_leaf else Recorded()


class Recorded:
    """Stands for the node of autograd that a recorded tensor will have."""

    def name(self) -> str:
        """Return the same of all: which function of autograd it will be is known when it runs."""
        return "recorded"


PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda self: self._value.meta.size,
    "dtype": lambda self: self._value.meta.dtype,
    "device": lambda self: self._value.meta.device,
    "requires_grad": lambda self: self._value.meta.requires_grad,
    "is_leaf": lambda self: self._value.meta.is_leaf,
    "ndim": lambda self: len(self._value.meta.shape),
    "grad": _gradient,
    "_grad": _gradient,
    "grad_fn": _grad_fn,
}
