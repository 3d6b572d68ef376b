"""Gradients that are asked for: of the whole where it fits, else in micro-batches.

Invariant: an attempt that fails leaves no gradient behind.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._oom import OomInfo, oom_info, oom_of_work

from ..._attempt import release
from ..._ranks import has_other_ranks
from ..._step import IsolatedGradients, leaves_of
from .._split import NotSplittableError
from .._tape import Reached, Tape, has_graph
from ._parts import (
    gradients_in_parts,
    in_parts,
    is_splittable,
    is_to_be_predicted,
    keep,
    leaves_in,
    note_split,
)
from ._refusals import refusal
from ._remembered import fails_whole
from ._used import consume, graph_of
from ._whole import join, run_whole, start_over


def make_whole(lazies: list[Any]) -> None:
    """Compute tensors with their graphs, of the whole batch."""
    for lazy in lazies:
        tape = lazy._tape.home()
        join(tape)
        if tape.pending() and run_whole(tape) is not None:
            raise whole_graph(tape, "torch.autograd.grad()")


def whole_graph(tape: Tape, call: str) -> Exception:
    """What says that a call can't be split."""
    return refusal(tape, NotSplittableError(f"{call} wants the graph of the whole batch"))


def backward(
    roots: list[Any], gradients: list[Any], retain_graph: Any, create_graph: bool, inputs: Any
) -> None:
    """Run what was recorded backward, whole where it fits, else in micro-batches."""
    root = _one_root(roots, gradients)
    tape: Tape = root._tape.home()
    number: int = root._number
    if graph_of(tape, number) & tape.spent:
        raise RuntimeError(_TWICE)
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        inputs = [_real_input(each) for each in inputs]
    keeps = create_graph if retain_graph is None else bool(retain_graph)
    is_known = fails_whole(tape) and is_splittable(tape, number, root._meta)
    # what was read in parts has its gradients: see
    # test_gradients_that_wait_are_used_when_there_is_more_memory_by_then
    waits = tape.held is not None and tape.held.number == number
    predict = not (create_graph or is_known or waits)
    if create_graph or not (is_known or waits or is_to_be_predicted(tape, number, root._meta)):
        info = _backward_whole(tape, number, keeps, create_graph, inputs)
        if info is None:
            if not keeps:
                consume(tape, number)
            return
        if create_graph:
            raise whole_graph(tape, "backward(create_graph=True)")
        note_split(tape, number, info)
    _backward_in_parts(tape, number, keeps, inputs, predict=predict)
    if not keeps:
        consume(tape, number)


_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Specify retain_graph=True if you need to backward through the "
    "graph a second time. A tensor of lazy() was used up by the backward pass before."
)


def _one_root(roots: list[Any], gradients: list[Any]) -> Any:
    """A scalar whose gradients are those that were asked for."""
    total: Any = None
    for root, gradient in zip(roots, gradients, strict=True):
        if not root.requires_grad:
            raise RuntimeError(
                "element 0 of tensors does not require grad and does not have a grad_fn"
            )
        if gradient is None and root.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        part = root
        if gradient is not None:
            if tuple(gradient.shape) != tuple(root.shape):
                raise RuntimeError(
                    f"Mismatch in shape: grad_output[0] has a shape of {tuple(gradient.shape)} and "
                    f"output[0] has a shape of {tuple(root.shape)}."
                )
            if root.dtype.is_complex:
                raise AdaptiveUsageError("backward() of a complex tensor of lazy() is not there.")
            with torch.enable_grad():
                part = (root * gradient).sum()
        with torch.enable_grad():
            total = part if total is None else total + part
    return total


def _real_input(tensor: Any) -> Tensor:
    if hasattr(tensor, "_tape"):
        found: Tensor = tensor._tape.home().leaves[tensor._number].value
        return found
    return tensor  # type: ignore[no-any-return]


def _backward_whole(
    tape: Tape, number: int, keeps: bool, create_graph: bool, inputs: Any
) -> OomInfo | None:
    """Run it as one; what ran out of memory, with all as before."""
    outside = sys.exception()
    # what can't be tried again needs no cut
    if create_graph or has_other_ranks():
        join(tape)
    if tape.is_split:
        start_over(tape)
    info = run_whole(tape) if tape.pending() else None
    if info is not None:
        return info
    isolated = IsolatedGradients(leaves_in(tape))
    isolated.begin()
    failure: BaseException | None = None
    proxies = tape.proxies.values()
    try:
        # leaves of both graphs get their gradients in two passes
        isolated.hold_hooks(leaves_of(proxy.origin for proxy in proxies))
        for proxy in proxies:
            proxy.begin()
        torch.autograd.backward(
            tape.values[number], retain_graph=keeps, create_graph=create_graph,
            inputs=inputs and [*inputs, *(proxy.root for proxy in proxies)],
        )  # fmt: skip
    except BaseException as error:
        isolated.undo()
        info = oom_of_work(error, outside)
        if info is None or not info.retry_safe:
            raise
        failure = error
    finally:
        reached = [each for proxy in proxies for each in proxy.take()]
    if failure is None:
        _deliver(isolated, reached, keeps, inputs)
        return None
    release(failure, outside)
    del failure
    start_over(tape)
    return info


def _backward_in_parts(tape: Tape, number: int, keeps: bool, inputs: Any, *, predict: bool) -> None:
    waiting, tape.held = tape.held, None
    if waiting is None or waiting.number != number:
        if tape.entries and any(entry.is_done for entry in tape.entries):
            start_over(tape)
        if inputs is None and not any(map(has_graph, tape.leaves.values())):
            keep(tape, in_parts(tape, number, predict=predict))
            return
        waiting, values = gradients_in_parts(tape, number, predict=predict)
        keep(tape, values)
    isolated = IsolatedGradients(leaves_in(tape))
    isolated.begin()
    isolated.hold_hooks(waiting.hooked)
    for leaf, gradient in waiting.leaves:
        if inputs is None or any(leaf is each for each in inputs):
            leaf.grad = gradient
    _deliver(isolated, waiting.reached, keeps, inputs)


def _deliver(isolated: IsolatedGradients, reached: list[Reached], keeps: bool, inputs: Any) -> None:
    """Run backward what leaves came of, and let everybody see all gradients, or none.

    Raises:
        AdaptiveUsageError: memory ran out in that graph.
    """
    try:
        if reached:
            tensors, gradients = zip(*reached, strict=True)
            _run_behind(tensors, gradients, keeps, inputs)
        isolated.finish()
    except BaseException:
        # an interrupt finds all delivered or nothing
        if isolated.is_delivered:
            isolated.finish()
        else:
            isolated.undo()
        raise


def _run_behind(tensors: Any, gradients: Any, keeps: bool, inputs: Any) -> None:
    try:
        # all at once: two of them may come of one graph, which runs backward only once
        torch.autograd.backward(tensors, gradients, retain_graph=keeps, inputs=inputs)
    except Exception as error:
        if oom_info(error) is None:
            raise
        raise AdaptiveUsageError(_USED_UP) from error


_USED_UP = (
    "Memory ran out in the backward pass of what a tensor was computed from before it met a tensor "
    "of lazy(). That graph is used up, so it can't be tried again, and smaller micro-batches would "
    "not make it smaller. All gradients are as before. Compute it from a tensor of lazy(), or "
    "detach() it."
)
