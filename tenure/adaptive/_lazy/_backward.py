"""Gradients that are asked for: of the whole where it fits, else in micro-batches.

Invariant: gradients are delivered all at once, or none is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._oom import OomInfo, oom_info, oom_of_work

from .._attempt import release
from .._interrupts import Interrupts
from .._step import IsolatedGradients, leaves_of
from ._evaluate import begin, consume, graph_of, run_whole, start_over
from ._handle import Handle, refuse_own_function
from ._parts import (
    Gradients,
    collecting,
    gradients_in_parts,
    is_known_to_fail,
    is_predicted,
    note_split,
    origins_in,
)
from ._tape import Tape

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
    tape: Tape = root._tape.home()
    number: int = root._number
    if graph_of(tape, number) & tape.spent:
        raise RuntimeError(_TWICE)
    keeps = bool(retain_graph)
    (held, found), tape.held = tape.held or (None, []), None
    # what was read in parts has its gradients: see
    # test_gradients_that_wait_are_used_when_there_is_more_memory_by_then
    if held != number:
        found = _gradients(tape, number, root._meta, keeps)
    _deliver(tape, found, keeps, inputs)
    if not keeps:
        consume(tape, number)


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


def _gradients(tape: Tape, number: int, meta: Any, keeps: bool) -> Gradients:
    is_known = is_known_to_fail(tape, number, meta)
    if not is_known and not is_predicted(tape, number, meta):
        found = _of_the_whole(tape, number, keeps)
        if not isinstance(found, OomInfo):
            return found
        note_split(tape, number, found)
    if any(entry.is_done for entry in tape.entries):
        start_over(tape)
    begin(tape)
    try:
        return gradients_in_parts(tape, number, predict=not is_known)
    except BaseException:
        start_over(tape)
        raise


def _of_the_whole(tape: Tape, number: int, keeps: bool) -> Gradients | OomInfo:
    """Return the gradients; or what ran out of memory, with all as before."""
    outside = sys.exception()
    if tape.is_split:
        start_over(tape)
    info = run_whole(tape) if tape.pending() else None
    if info is not None:
        return info
    try:
        with collecting(tape) as isolated:
            torch.autograd.backward(tape.values[number], retain_graph=keeps or tape.is_joined)
            return isolated.new()
    except Exception as error:
        info = oom_of_work(error, outside)
        if info is None or not info.retry_safe:
            raise
        failure = error
    release(failure, outside)
    del failure
    start_over(tape)
    return info


def _deliver(tape: Tape, found: Gradients, keeps: bool, inputs: Any) -> None:
    """Run backward what leaves came of, and let everybody see all gradients, or none.

    Raises:
        AdaptiveUsageError: memory ran out in that graph.
    """
    if inputs is not None:
        inputs = [_real(t) for t in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    cuts = {id(leaf.value): leaf for leaf in tape.leaves.values() if leaf.origin is not None}
    behind = leaves_of(origins_in(tape))
    isolated = IsolatedGradients([*(leaf for leaf, _ in found), *behind])
    isolated.begin()
    isolated.hold_hooks(behind)
    try:
        for leaf, gradient in found:
            if id(leaf) in cuts or inputs is None or any(leaf is each for each in inputs):
                leaf.grad = gradient
        while reached := [leaf for leaf in cuts.values() if leaf.value.grad is not None]:
            _run_behind(reached, keeps or tape.is_joined, inputs)
        isolated.run_hooks()
        # an interrupt finds all delivered or nothing
        with Interrupts():
            isolated.finish()
    except BaseException:
        isolated.undo()
        raise


def _real(tensor: Any) -> Tensor:
    if isinstance(tensor, Handle):
        leaf = tensor._tape.home().leaves[tensor._number]
        return leaf.value if leaf.origin is None else leaf.origin
    return tensor  # type: ignore[no-any-return]


def _run_behind(reached: list[Any], keeps: bool, inputs: Any) -> None:
    gradients = [leaf.value.grad for leaf in reached]
    for leaf in reached:
        leaf.value.grad = None
    try:
        # all at once: two of them may come of one graph, which runs backward only once
        torch.autograd.backward(
            [leaf.origin for leaf in reached], gradients, retain_graph=keeps, inputs=inputs
        )
    except Exception as error:
        if oom_info(error) is None:
            raise
        raise AdaptiveUsageError(_USED_UP) from error
