"""Changes of how a step runs, whatever its model is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tenure._torch.fakes import is_fake

from .._predict import Work
from .._step import SampleTree, StepSpec, step_at_size
from ._change import Change, expression_of, is_split


def smaller_micro_batches(work: Work, has_backward: bool) -> Iterator[Change]:
    """Half of the batch at a time: `plan` says which size fits a budget."""
    if not has_backward or len(work.args) != 1 or work.kwargs or is_split(work):
        return
    try:
        tree = SampleTree(work.args[0], 0, name="batch", argument="in_dims")
        size = (tree.n_samples() + 1) // 2
    # no batch that can be split
    except Exception:
        return
    if size < tree.n_samples():
        yield Change(
            f"run micro-batches of {size} of the {tree.n_samples()} samples (step has the "
            "gradients of the whole, where the loss is a mean over samples)",
            f"tenure.adaptive.step(fn, batch, maximum={size})",
            around=functools.partial(_in_micro_batches, size),
        )


def _in_micro_batches(size: int, fn: Callable[..., Any]) -> Callable[[Any], None]:
    def run(batch: Any) -> None:
        step_at_size(StepSpec(entry="step", fn=fn, batch=batch), size)

    return run


def dropped_gradients(work: Work, has_backward: bool) -> Iterator[Change]:
    """Gradients of zeros that are there while the forward pass runs."""
    zeroed = [p for p in work.parameters if _has_zeros(p)]
    if has_backward and zeroed:
        yield Change(
            f"drop the gradients of {len(zeroed)} parameters before the step, instead of filling "
            "them with zeros",
            f"{_optimizer_or_model(work)}.zero_grad(set_to_none=True)",
            functools.partial(_without_gradients, zeroed),
        )


def _has_zeros(parameter: Tensor) -> bool:
    gradient = parameter.grad if parameter.is_leaf else None
    if gradient is None or gradient.is_meta or is_fake(gradient):
        return False
    return not bool(gradient.any())


@contextmanager
def _without_gradients(parameters: list[Tensor]) -> Iterator[None]:
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _optimizer_or_model(work: Work) -> str:
    if work.optimizer is not None or not work.roots:
        return "optimizer"
    return expression_of(work, next(iter(work.roots.values())))


def optimizer_kinds(work: Work, has_backward: bool) -> Iterator[Change]:
    """Steps of an optimizer that copy less: one parameter after the other, or in one kernel."""
    groups = [] if work.optimizer is None else work.optimizer.param_groups
    kind = type(work.optimizer).__name__
    if any("foreach" in group for group in groups):
        yield Change(
            f"let {kind} step one parameter after the other",
            "for group in optimizer.param_groups: group.update(foreach=False, fused=False)",
            functools.partial(_with_options, groups, {"foreach": False, "fused": False}),
        )
    if any("fused" in group and not group["fused"] for group in groups):
        yield Change(
            f"let {kind} step in one kernel",
            f"{kind}(..., fused=True), where the optimizer is made",
            functools.partial(_with_options, groups, {"foreach": False, "fused": True}),
        )


@contextmanager
def _with_options(groups: list[dict[str, Any]], options: dict[str, bool]) -> Iterator[None]:
    before = [{key: group[key] for key in options if key in group} for group in groups]
    try:
        for group, own in zip(groups, before, strict=True):
            group.update({key: options[key] for key in own})
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            group.update(own)


def offloaded(work: Work, has_backward: bool) -> Iterator[Change]:
    """What the backward pass needs, on the host until then."""
    # on the host it is there already
    if has_backward and work.device.type != "cpu":
        yield Change(
            "keep what the backward pass needs on the host",
            "with torch.autograd.graph.save_on_cpu(pin_memory=True): loss = fn(batch)"
            f"{_or_paged(work)}",
            around=_saving_on_the_host,
            is_told_anyway=True,
        )


def _or_paged(work: Work) -> str:
    """What moves the weights as well, and fetches ahead, as a comment behind the code."""
    if len(work.roots) != 1:
        return ""
    model = expression_of(work, next(iter(work.roots.values())))
    told = f'{model}.cpu(), "{work.device}", training=True, activations="host"'
    return f"  # or, with the weights: tenure.paging.page({told})"


def _saving_on_the_host(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return fn(*args, **kwargs)

    return run


def autocast(work: Work, has_backward: bool) -> Iterator[Change]:
    """Matrix products in bfloat16."""
    # torch warns of autocast for a device that is not here, and leaves it off
    if work.target.stands_for is not None:
        return
    kind = work.device.type
    has_floats = any(p.dtype is torch.float32 for p in work.parameters)
    if has_floats and work.modules and not torch.is_autocast_enabled(kind):
        yield Change(
            "run the forward pass in bfloat16 where autocast does",
            f'with torch.autocast("{kind}", torch.bfloat16): loss = fn(batch)',
            around=functools.partial(_in_bfloat16, kind),
            changes_numbers=True,
        )


def _in_bfloat16(kind: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, torch.bfloat16):
            return fn(*args, **kwargs)

    return run
