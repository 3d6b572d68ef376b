"""Gradients that are asked for: of the whole where it fits, else in micro-batches.

Invariant: gradients are delivered all at once, or none is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._oom import oom_info

from .._interrupts import Interrupts
from .._step import IsolatedGradients, leaves_of
from ._evaluate import (
    consume,
    graph_of,
    pending_of,
    run_whole,
    whole_or_parts,
)
from ._program import Gradients, collecting, origins_in
from ._tape import Handle, Tape, Value, inputs_of, refuse_own_function

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
_SECOND = (
    "{} wants the graph of the whole batch, which lazy() does not give. Nothing was computed. "
    "Compute it with plain tensors, or in the function that step() runs."
)


def backward(self: Handle, gradient: Any = None, retain_graph: Any = None,
             create_graph: bool = False, inputs: Any = None) -> None:  # fmt: skip
    """Run what was recorded backward, whole where it fits, else in micro-batches."""
    refuse_own_function(self)
    if create_graph:
        raise AdaptiveUsageError(_SECOND.format("backward(create_graph=True)"))
    root: Any = _scalar(self, gradient)
    tape, value = root._tape, root._value
    if any(each.is_spent for each in graph_of(tape, value)):
        raise RuntimeError(_TWICE)
    keeps = bool(retain_graph)
    (held, found), tape.held = tape.held or (None, []), None
    try:
        # what was read in parts has its gradients: see
        # test_gradients_that_wait_are_used_when_there_is_more_memory_by_then
        if held is not value:
            found = whole_or_parts(
                tape, value, lambda: _of_the_whole(tape, value, keeps), is_root=True
            )
        _deliver(tape, found, keeps, inputs)
    except BaseException:
        tape.failed.add(value)
        raise
    if not keeps:
        consume(tape, value)


def backward_of(tensors: Any, grad_tensors: Any = None, *others: Any, **options: Any) -> None:
    """Do the same for `torch.autograd.backward`."""
    roots, gradients = (
        [given] if given is None or isinstance(given, Tensor) else list(given)
        for given in (tensors, grad_tensors)
    )
    if len(roots) != 1:
        raise AdaptiveUsageError(
            "torch.autograd.backward() got several tensors, one of them of lazy(). Call backward() "
            "of their sum."
        )
    root: Any = roots[0]
    arguments: list[Any] = [*gradients, *others]
    backward(root, *arguments, **options)


def refuse_grad(*_: Any, **__: Any) -> None:
    """Refuse `torch.autograd.grad`.

    Raises:
        AdaptiveUsageError: always.
    """
    raise AdaptiveUsageError(_SECOND.format("torch.autograd.grad()"))


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
        raise AdaptiveUsageError("backward() of a complex tensor of lazy() is not there.")
    with torch.enable_grad():
        return (root * gradient).sum()


def _of_the_whole(tape: Tape, value: Value, keeps: bool) -> Gradients:
    if tape.is_split:
        tape.start_over()
    pending = pending_of(tape, value)
    if pending:
        run_whole(tape, pending)
    with collecting(tape) as isolated:
        torch.autograd.backward(value.cut(), retain_graph=keeps or tape.is_joined)
        return isolated.new()


def _deliver(tape: Tape, found: Gradients, keeps: bool, inputs: Any) -> None:
    """Run backward what leaves came of, and let everybody see all gradients, or none.

    Raises:
        AdaptiveUsageError: memory ran out in that graph.
    """
    if inputs is not None:
        inputs = [_real(t) for t in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    cuts: list[tuple[Any, Value]] = [
        (value.tensor, value) for value in inputs_of(tape.entries) if value.origin is not None
    ]
    behind = leaves_of(origins_in(tape))
    isolated = IsolatedGradients([*(leaf for leaf, _ in found), *behind])
    isolated.begin()
    isolated.hold_hooks(behind)
    try:
        for leaf, gradient in found:
            if inputs is None or any(leaf is each for each in (*inputs, *dict(cuts))):
                leaf.grad = gradient
        while reached := [(cut, v.origin) for cut, v in cuts if cut.grad is not None]:
            _run_behind(reached, keeps or tape.is_joined, inputs)
        isolated.run_hooks()
        # an interrupt finds all delivered or nothing
        with Interrupts():
            isolated.finish()
    except BaseException:
        isolated.undo()
        raise


def _real(tensor: Any) -> Tensor:
    found: Tensor | None = tensor._value.given if isinstance(tensor, Handle) else tensor
    if found is None:
        raise AdaptiveUsageError(_SECOND.format("backward(inputs=) of a recorded tensor"))
    return found


def _run_behind(reached: list[tuple[Any, Any]], keeps: bool, inputs: Any) -> None:
    gradients = [cut.grad for cut, _ in reached]
    for cut, _ in reached:
        cut.grad = None
    try:
        # all at once: two of them may come of one graph, which runs backward only once
        torch.autograd.backward(
            [origin for _, origin in reached], gradients, retain_graph=keeps, inputs=inputs
        )
    except Exception as error:
        if oom_info(error) is None:
            raise
        raise AdaptiveUsageError(_USED_UP) from error
