"""All changes that are known, tried on one piece of work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tenure._show import steps
from tenure._torch.storages import key_of

from .._predict import Advice, Work, advise_with
from .._step import SampleTree, StepSpec, step_at_size
from ._change import WITH_INNER, AdvisedChange, entries_set, expression_of, repeated_blocks
from ._cross_entropy import chunked_cross_entropy

_logger = logging.getLogger("tenure.adaptive")


def advise(work: Work, peak_bytes: int, has_backward: bool) -> tuple[Advice, ...]:
    """Return changes that would lower the peak of a piece of work.

    Args:
        work: it; left as it is.
        peak_bytes: its peak.
        has_backward: whether a backward pass runs in it.
    """
    found: list[Advice] = []
    with steps("advice") as show:
        for change in (each for find in _KNOWN for each in find(work, has_backward)):
            show(change.what)
            try:
                left_bytes = change.peak_bytes(work)
            # what the work can't run with, whatever it says then, is no advice
            except Exception:
                _logger.debug("not advised: %s", change.what, exc_info=True)
                continue
            saves_bytes = peak_bytes - left_bytes
            if saves_bytes > 0 or change.is_told_anyway:
                advice = change.what, change.how, left_bytes, saves_bytes, change.changes_numbers
                found.append(Advice(*advice))
    return tuple(found)


def _smaller_micro_batches(work: Work, has_backward: bool) -> Iterator[AdvisedChange]:
    """Half of the batch at a time: `plan` says which size fits a budget."""
    is_split = hasattr(work.fn, WITH_INNER)
    if not has_backward or len(work.args) != 1 or work.kwargs or is_split:
        return
    try:
        n_samples = SampleTree(work.args[0], 0, name="batch", argument="in_dims").n_samples()
    # no batch that can be split
    except Exception:
        return
    size = (n_samples + 1) // 2
    if size < n_samples:
        yield AdvisedChange(
            f"run micro-batches of {size} of the {n_samples} samples (step has the gradients of "
            "the whole, where the loss is a mean over samples)",
            f"tenure.adaptive.step(fn, batch, maximum={size})",
            around=functools.partial(_in_micro_batches, size),
        )


def _in_micro_batches(size: int, fn: Callable[..., Any]) -> Callable[[Any], None]:
    def run(batch: Any) -> None:
        step_at_size(StepSpec(entry="step", fn=fn, batch=batch), size)

    return run


def _checkpointing(work: Work, has_backward: bool) -> Iterator[AdvisedChange]:
    """Checkpointing of repeated blocks, the outermost."""
    for container, start, blocks in repeated_blocks(work) if has_backward else ():
        whole = len(blocks) == len(container)
        part = "" if whole else f"[{start}:{start + len(blocks)}]"
        place = expression_of(work, container) + part
        # once each, though a module be there twice
        forwards = [
            (
                vars(block),
                {"forward": functools.partial(checkpoint, block.forward, use_reentrant=False)},
            )
            for block in dict.fromkeys(blocks)
        ]
        yield AdvisedChange(
            f"checkpoint the {len(blocks)} {type(blocks[0]).__name__} of {place}",
            f"for block in {place}: block.forward = functools.partial("
            "torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)",
            functools.partial(entries_set, forwards),
            is_told_anyway=True,
        )


def _paged_weights(work: Work, has_backward: bool) -> Iterator[AdvisedChange]:
    """Paging of a model that is not trained, in what two of its largest parts take."""
    # on the host there is nothing to gain, and weights that are trained are not paged
    if has_backward or work.device.type == "cpu" or len(work.roots) != 1:
        return
    (root,) = work.roots.values()
    blocks = {block for _, _, each in repeated_blocks(work) for block in each}
    # one that computes, and one that comes
    budget_bytes = 2 * max((_bytes_of(part) for part in _parts(root, blocks)), default=0)
    weight_bytes = _bytes_of(root)
    if budget_bytes < weight_bytes:
        yield AdvisedChange(
            f"page the weights through {budget_bytes} bytes of {work.device}",
            f'tenure.paging.page({expression_of(work, root)}.cpu(), "{work.device}", '
            f"budget={budget_bytes})",
            paged_bytes=weight_bytes - budget_bytes,
        )


def _parts(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Return the largest modules that have weights of their own or are repeated."""
    own = (*module._parameters.values(), *module._buffers.values())
    if module in blocks or any(each is not None for each in own):
        yield module
        return
    for child in module.children():
        yield from _parts(child, blocks)


def _bytes_of(module: nn.Module) -> int:
    storages = [each.untyped_storage() for each in (*module.parameters(), *module.buffers())]
    return sum({key_of(each): each.nbytes() for each in storages}.values())


def _optimizer_steps(work: Work, has_backward: bool) -> Iterator[AdvisedChange]:
    """Yield steps of an optimizer that copy less: one parameter after the other."""
    groups = [] if work.optimizer is None else work.optimizer.param_groups
    options = {"foreach": False, "fused": False}
    if any("foreach" in group for group in groups):
        own = [(group, {k: v for k, v in options.items() if k in group}) for group in groups]
        yield AdvisedChange(
            f"let {type(work.optimizer).__name__} step one parameter after the other",
            "for group in optimizer.param_groups: group.update(foreach=False, fused=False)",
            functools.partial(entries_set, own),
        )


def _offloaded(work: Work, has_backward: bool) -> Iterator[AdvisedChange]:
    """Offload the tensors that the backward pass needs to the host until then."""
    # on the host it is there already
    if not has_backward or work.device.type == "cpu":
        return
    how = "with torch.autograd.graph.save_on_cpu(pin_memory=True): loss = fn(batch)"
    # what moves the weights as well, and fetches ahead
    if len(work.roots) == 1:
        model = expression_of(work, next(iter(work.roots.values())))
        told = f'{model}.cpu(), "{work.device}", training=True, activations="host"'
        how += f"  # or, with the weights: tenure.paging.page({told})"
    yield AdvisedChange(
        "keep what the backward pass needs on the host",
        how,
        around=functools.partial(_within, torch.autograd.graph.save_on_cpu),
        is_told_anyway=True,
    )


def _autocast(work: Work, has_backward: bool) -> Iterator[AdvisedChange]:
    """Matrix products in bfloat16."""
    # torch warns of autocast for a device that is not here, and leaves it off
    if work.target.stands_for is not None:
        return
    kind = work.device.type
    has_floats = any(p.dtype is torch.float32 for p in work.parameters)
    if has_floats and work.modules and not torch.is_autocast_enabled(kind):
        yield AdvisedChange(
            "run the forward pass in bfloat16 where autocast does",
            f'with torch.autocast("{kind}", torch.bfloat16): loss = fn(batch)',
            around=functools.partial(_within, lambda: torch.autocast(kind, torch.bfloat16)),
            changes_numbers=True,
        )


def _within(
    block: Callable[[], AbstractContextManager[Any]], fn: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with block():
            return fn(*args, **kwargs)

    return run


# each gets the work, and whether it has a backward pass
_KNOWN: tuple[Callable[[Work, bool], Iterable[AdvisedChange]], ...] = (
    _smaller_micro_batches,
    _checkpointing,
    chunked_cross_entropy,
    _paged_weights,
    _optimizer_steps,
    _offloaded,
    _autocast,
)
advise_with(advise)
