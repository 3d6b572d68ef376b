"""What is answered without being recorded: questions that need no data, and those that want it all.

Invariant: what Python is told of a recorded tensor is what plain PyTorch would tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenure._callers import capture_site
from tenure._oom import oom_of_work

from ._evaluate import backward, gradient_of, make_whole, value_of, whole_graph
from ._handle import Handle, refuse_own_function
from ._names import names
from ._shapes import HOOK, meta_of
from ._tape import Entry, Modes, Ref, new_number


def _size(self: Handle, dim: int | None = None) -> Any:
    return self._meta.size if dim is None else self._meta.size[dim]


def _numel(self: Handle) -> int:
    total: int = 1
    for each in self._meta.size:
        total = total * each
    return total


def _stride(self: Handle, dim: int | None = None) -> Any:
    return self._meta.stride if dim is None else self._meta.stride[dim]


def _on_value(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _computed(each) for name, each in kwargs.items()}
        return function(*[_computed(each) for each in args], **named)

    return call


def _computed(value: Any) -> Any:
    return value_of(value).detach() if isinstance(value, Handle) else value


def _register_hook(self: Handle, hook: Callable[..., Any]) -> Any:
    handle = LaterHandle()
    _noted(self, _hook_later, (Ref(self._number), hook, handle))
    return handle


def _hook_later(tensor: Tensor, hook: Callable[..., Any], handle: LaterHandle) -> None:
    handle.begin(tensor.register_hook(hook))


def _noted(self: Handle, func: Any, args: tuple[Any, ...]) -> None:
    """Record what gives no tensor and wants the whole gradient."""
    tape = self._tape.home()
    modes, site = Modes.now(tape.kind), capture_site(sys._getframe(2), "site")
    entry = Entry(new_number(), func, args, {}, modes, (), (self._number,), HOOK, site=site)
    tape.entries.append(entry)


class LaterHandle:
    """Removes a hook that is registered later."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._is_removed = False

    def begin(self, handle: Any) -> None:
        """It was registered."""
        self._handle = handle
        if self._is_removed:
            handle.remove()

    def remove(self) -> None:
        """Take the hook off, or don't register it."""
        self._is_removed = True
        if self._handle is not None:
            self._handle.remove()


def _retain_grad(self: Handle) -> None:
    leaf = self._tape.home().leaves.get(self._number)
    if leaf is not None:
        leaf.value.retain_grad()
    elif not self._meta.is_leaf:
        _noted(self, Tensor.retain_grad, (Ref(self._number),))


def _contains(self: Handle, element: Any) -> bool:
    return _plain(element) in value_of(self)


def _backward(self: Handle, gradient: Any = None, retain_graph: Any = None,
              create_graph: bool = False, inputs: Any = None) -> None:  # fmt: skip
    refuse_own_function(self)
    backward([self], [gradient], retain_graph, create_graph, inputs)


def _backward_of(tensors: Any, grad_tensors: Any = None, retain_graph: Any = None,
                 create_graph: bool = False, grad_variables: Any = None,
                 inputs: Any = None) -> None:  # fmt: skip
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
    gradients = list(given) if given else [None] * len(roots)
    for root in roots:
        if isinstance(root, Handle):
            refuse_own_function(root)
    backward(roots, gradients, retain_graph, create_graph, inputs)


def _gradients_of(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> Any:
    """As `torch.autograd.grad`, of the whole batch."""
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    handles = [t for t in (*outputs, *inputs, *(given or ())) if isinstance(t, Handle)]
    for each in handles:
        refuse_own_function(each)
    make_whole(handles)
    real: Any = [v and [_plain(each) for each in v] for v in (outputs, inputs, given)]
    outside = sys.exception()
    try:
        return torch.autograd.grad(*real, **kwargs)
    except Exception as error:
        if oom_of_work(error, outside) is None:
            raise
        raise whole_graph(handles[0]._tape.home(), "torch.autograd.grad()") from error


def _plain(value: Any) -> Any:
    return value_of(value) if isinstance(value, Handle) else value


def _requires_grad_(self: Handle, requires_grad: bool = True) -> Handle:
    tape = self._tape.home()
    leaf = tape.leaves.get(self._number)
    if leaf is None or any(self._number in entry.reads for entry in tape.entries):
        _noted(self, Tensor.requires_grad_, (Ref(self._number), requires_grad))
        self._become(self._meta.requiring(requires_grad))
        return self
    leaf.value.requires_grad_(requires_grad)
    self._become(meta_of(leaf.value, self._meta.label))
    return self


ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.size: _size,
    Tensor.numel: _numel,
    Tensor.nelement: _numel,
    torch.numel: _numel,
    Tensor.stride: _stride,
    Tensor.dim: lambda self: len(self._meta.shape),
    Tensor.ndimension: lambda self: len(self._meta.shape),
    Tensor.__len__: lambda self: int(self._meta.shape[0]),
    Tensor.backward: _backward,
    torch.autograd.backward: _backward_of,
    torch.autograd.grad: _gradients_of,
    Tensor.requires_grad_: _requires_grad_,
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _retain_grad,
    Tensor.is_floating_point: lambda self: self._meta.dtype.is_floating_point,
    Tensor.__contains__: _contains,
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
        """The same of all: which function of autograd it will be is known when it runs."""
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
    "grad": gradient_of,
    "_grad": gradient_of,
    "grad_fn": _grad_fn,
    "_version": lambda self: 0,
    "_backward_hooks": lambda self: None,
    "names": lambda self: (None,) * len(self._meta.shape),
    "output_nr": lambda self: 0,
}
