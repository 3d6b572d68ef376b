"""Tensors that are recorded, and their gradients.

Invariant: a call of torch is answered where no data is needed, else recorded; what comes past the
recording is refused. Gradients are delivered all at once, or none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tenure._containers import mapped
from tenure._errors import AdaptiveUsageError
from tenure._oom import oom_info
from tenure._text import describe_elements, describe_tensor
from tenure._torch.compiler import is_dynamo_compiling, never_compiled

from .._interrupts import Interrupts
from .._step import IsolatedGradients, leaves_of
from ._meta import Label
from ._recording import record, watched_checkpoints
from ._split import (
    Gradients,
    collecting,
    failing,
    origins_in,
    run_whole,
    value_of,
    whole_or_parts,
)
from ._tape import Handle, Tape, Value, graph_of, refuse_own_function

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Specify retain_graph=True if you need to backward through the "
    "graph a second time. A tensor of lazy() was used up by the backward pass before."
)
_USED_UP = (
    "Memory ran out in the backward pass of what a tensor was computed from before it met a tensor "
    "of lazy(). That graph is used up, so it can't be tried again, and smaller micro-batches would "
    "not make it smaller. All gradients are as before. Compute it from a tensor of lazy(), or "
    "detach() it."
)
_COMPILED = (
    "A function that torch.compile has compiled was called with a tensor of lazy(): what it "
    "computes can't be recorded. Call the function that is not compiled, or use step()."
)


class LazyTensor(Handle):
    """A tensor that was recorded and not computed; see `lazy`."""

    @classmethod
    @never_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the call, or answer it where no data is needed."""
        if is_dynamo_compiling():
            raise AdaptiveUsageError(_COMPILED)
        # a method of TorchScript has no name
        if getattr(func, "__name__", "") == "__get__":
            answer = _PROPERTIES.get(func.__self__.__name__)  # type: ignore[attr-defined]
            if answer is not None:
                return answer(args[0])
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        return record(func, args, dict(kwargs) if kwargs else {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what came past the recording."""
        raise AdaptiveUsageError(
            f"{func} got a tensor of lazy() where its calls can't be recorded, as in compiled code "
            "or in C++ that calls torch. Pass it value(), or use step(), which runs functions "
            "whole."
        )

    def value(self) -> Tensor:
        """Return the tensor itself, computed if it was not."""
        refuse_own_function(self)
        value = value_of(self).detach()
        trains = self._value.meta.requires_grad and torch.is_grad_enabled()
        if not trains or value.is_inference():
            return value
        read: Any = value.requires_grad_().view_as(value)
        # its graph is the recording's own: gradients would end here
        read.grad_fn.register_prehook(_refuse_backward)
        found: Tensor = read
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe it without computing anything."""
        meta = self._value.meta
        what = f"{describe_elements(meta.dtype, meta.shape)} on {meta.device}"
        done = self._value.tensor is not None
        return f"lazy {what}{'' if done else ', not computed yet'}"

    def __str__(self) -> str:
        """Do as the tensor itself."""
        return str(self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save it as the tensor itself."""
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the computed tensor; one with a graph can't be copied, as in plain torch."""
        return self.value().__deepcopy__(memo)


def _refuse_backward(*_: Any) -> None:
    raise AdaptiveUsageError(
        "What value() gave of a tensor of lazy() was run backward. Call backward() of the "
        "recorded tensor, or detach() what value() gives."
    )


@never_compiled
def lazy(*values: Any, batch: int = 0) -> Any:
    """Record what is done with tensors, and run it in micro-batches where it does not fit.

    Args:
        *values: tensors, or lists, tuples and dicts of them; other things come back as they are.
        batch: the dimension that has the samples.

    Returns:
        The same with a recorded tensor for each; a tuple where several were given.

    Raises:
        AdaptiveUsageError: a tensor can't be recorded, or has no such dimension.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import lazy
        >>> model = nn.Linear(4, 1)
        >>> x, y = lazy(torch.randn(8, 4), torch.randn(8, 1))
        >>> loss = nn.functional.mse_loss(model(x), y)
        >>> loss
        lazy float32[] on cpu, not computed yet
        >>> loss.backward()
        >>> model.weight.grad.shape
        torch.Size([1, 4])
    """
    tapes: dict[int, Tape] = {}

    def recorded(tensor: Tensor) -> Tensor:
        if isinstance(tensor, LazyTensor):
            return tensor
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise AdaptiveUsageError(
                f"lazy() got a tensor that is not dense, {describe_tensor(tensor)}. Pass a dense "
                "one, or use step()."
            )
        if not isinstance(batch, Integral) or not -tensor.dim() <= batch < tensor.dim():
            raise AdaptiveUsageError(
                f"lazy() got {describe_tensor(tensor)}, which has no dimension {batch} for its "
                "samples. Leave it a plain tensor if all samples share it."
            )
        dim = int(batch) % tensor.dim()
        n_samples = tensor.shape[dim]
        if n_samples not in tapes:
            tapes[n_samples] = Tape(n_samples)
            watched_checkpoints.last_while(tapes[n_samples])
        tape = tapes[n_samples]
        return LazyTensor._of(tape, Value.known(tensor, Label(dim)))

    made = tuple(mapped(recorded, value) for value in values)
    return made[0] if len(made) == 1 else made


# --- gradients


def _backward(self: Handle, gradient: Any = None, retain_graph: Any = None,
              create_graph: bool = False, inputs: Any = None) -> None:  # fmt: skip
    """Run what was recorded backward, whole where it fits, else in micro-batches."""
    refuse_own_function(self)
    if create_graph or inputs is not None:
        _refused(f"backward({'create_graph=True' if create_graph else 'inputs='})")()
    root: Any = _scalar(self, gradient)
    tape, value = root._tape, root._value
    if any(each.is_spent for each in graph_of(tape.entries, value)):
        raise RuntimeError(_TWICE)
    keeps = bool(retain_graph)

    def of_the_whole() -> Gradients:
        if tape.is_split:
            tape.start_over()
        if pending := tape.pending(value):
            run_whole(tape, pending)
        with collecting(tape) as isolated:
            torch.autograd.backward(value.cut(), retain_graph=keeps or tape.is_joined)
            return isolated.new()

    (held, found), tape.held = tape.held or (None, []), None
    with failing(tape, value):
        # what was read in parts has its gradients, also where there is more memory by now
        if held is not value:
            found = whole_or_parts(tape, value, of_the_whole, is_loss=True)
        _deliver(tape, found, keeps)
    if not keeps:
        tape.consume(value)


def _scalar(root: Any, gradient: Any) -> Any:
    """Return a number whose gradients are those that were asked for."""
    if not root.requires_grad:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    if gradient is None:
        if root.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return root
    if tuple(gradient.shape) != tuple(root.shape):
        raise RuntimeError(
            f"Mismatch in shape: grad_output[0] has a shape of {tuple(gradient.shape)} and "
            f"output[0] has a shape of {tuple(root.shape)}."
        )
    if root.dtype.is_complex:
        _refused("backward() of a complex tensor of lazy()")()
    with torch.enable_grad():
        return (root * gradient).sum()


def _deliver(tape: Tape, found: Gradients, keeps: bool) -> None:
    """Run backward what leaves came of, and let everybody see all gradients, or none.

    Raises:
        AdaptiveUsageError: memory ran out in that graph.
    """
    cuts: list[tuple[Any, Any]] = [(value.tensor, origin) for value, origin in origins_in(tape)]
    behind = leaves_of(origin for _, origin in cuts)
    isolated = IsolatedGradients([*(leaf for leaf, _ in found), *behind])
    isolated.begin()
    isolated.hold_hooks(behind)
    try:
        for leaf, gradient in found:
            leaf.grad = gradient
        while reached := [(cut, origin) for cut, origin in cuts if cut.grad is not None]:
            gradients = [cut.grad for cut, _ in reached]
            for cut, _ in reached:
                cut.grad = None
            # all at once: two of them may come of one graph, which runs backward only once
            torch.autograd.backward(
                [origin for _, origin in reached], gradients, retain_graph=keeps or tape.is_joined
            )
        isolated.run_hooks()
        # an interrupt finds all delivered or nothing
        with Interrupts():
            isolated.finish()
    except BaseException as error:
        isolated.undo()
        if oom_info(error) is None:
            raise
        raise AdaptiveUsageError(_USED_UP) from error


# --- what is answered without being recorded


def _size(self: Handle, dim: int | None = None) -> Any:
    return self._value.meta.size if dim is None else self._value.meta.size[dim]


def _numel(self: Handle) -> int:
    # of sizes that know how they depend on the batch
    return math.prod(self._value.meta.size)


def _computed(value: Any) -> Any:
    return value_of(value).detach() if isinstance(value, Handle) else value


def _on_value(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _computed(each) for name, each in kwargs.items()}
        return function(*map(_computed, args), **named)

    return call


def _refused(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise AdaptiveUsageError(
            f"{name} wants the graph of the whole batch, which lazy() does not give. Nothing was "
            "recorded, or computed. Call backward() of one recorded number, or use plain tensors "
            "in the function that step() runs."
        )

    return call


def _requires_grad_(self: Handle, requires_grad: bool = True) -> Any:
    if self._value.mark is not None:
        raise AdaptiveUsageError(
            "requires_grad_() of a tensor that lazy() gave: call it of the plain tensor, before "
            "lazy(). That one gets the gradient."
        )
    return record(Tensor.requires_grad_, (self, requires_grad), {})


def _gradient(self: Handle) -> Any:
    """Return the gradient of a tensor that was given; what was computed keeps none."""
    value = self._value
    # of one that was computed and used up nothing requires grad any more
    if value.mark is not None and value.tensor is not None and value.tensor.requires_grad:
        return value.tensor.grad
    if value.meta.is_leaf and value.meta.requires_grad:
        raise AdaptiveUsageError(
            "The gradient of a tensor that was computed of one of lazy() is not kept. Use step()."
        )
    return None


def _grad_fn(self: Handle) -> Any:
    # hooks of modules look for their own function here
    refuse_own_function(self)
    return None if self._value.meta.is_leaf else Recorded()


class Recorded:
    """Stands for the node of autograd that a recorded tensor will have."""

    def name(self) -> str:
        """Return the same of all: which function of autograd it will be is known when it runs."""
        return "recorded"


_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.size: _size,
    Tensor.numel: _numel,
    Tensor.nelement: _numel,
    torch.numel: _numel,
    Tensor.dim: lambda self: len(self._value.meta.shape),
    Tensor.backward: _backward,
    torch.autograd.backward: _refused("torch.autograd.backward()"),
    torch.autograd.grad: _refused("torch.autograd.grad()"),
    Tensor.requires_grad_: _requires_grad_,
    Tensor.requires_grad.__set__: _requires_grad_,  # type: ignore[attr-defined]
    Tensor.register_hook: _refused("register_hook() of a tensor of lazy()"),
    Tensor.register_post_accumulate_grad_hook: _refused(
        "register_post_accumulate_grad_hook() of a tensor of lazy()"
    ),
    Tensor.retain_grad: _refused("retain_grad() of a tensor of lazy()"),
    Tensor.__contains__: lambda self, element: _computed(element) in value_of(self),
}
_WITH_DATA = """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __dlpack__
    __dlpack_device__ data_ptr untyped_storage storage storage_offset is_shared is_pinned equal
    allclose __hex__ __oct__ __format__
"""
for _name in _WITH_DATA.split():
    if hasattr(Tensor, _name):
        _ANSWERS[getattr(Tensor, _name)] = _on_value(getattr(Tensor, _name))

_PROPERTIES: dict[str, Callable[[Any], Any]] = {
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
