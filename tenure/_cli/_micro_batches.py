"""The largest micro-batch of a step that fits, found by predicting steps of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, autograd, ones_like
from torch.optim import Optimizer

from tenure._containers import level_of
from tenure.adaptive import PeakReport, predict_peak


def largest_micro_batch(
    fn: Callable[[Any], Any],
    batch: Any,
    optimizer: Optimizer | None,
    device: str | None,
    budget_bytes: int,
) -> tuple[int, int, PeakReport] | None:
    """Find out in which micro-batches a step fits whose whole batch does not.

    Args:
        fn: gives the loss of a batch.
        batch: tensors of any dtype whose first dimension has one size, in containers of any kind.
        optimizer: steps at the end; or None.
        device: as of `predict_peak`.
        budget_bytes: what there is.

    Returns:
        The size, how many samples the batch has, and what the step takes; of micro-batches of one
        sample where even these do not fit. None where the batch can't be split.
    """
    n_samples = _n_samples(batch)
    if n_samples is None or n_samples < 2:
        return None

    def predicted(size: int) -> PeakReport:
        def step(whole: Any) -> Any:
            # two of them: beside the second are the gradients of the first
            _send_back(fn(_cut(whole, 0, size)))
            return fn(_cut(whole, size, min(2 * size, n_samples)))

        return predict_peak(step, batch, optimizer=optimizer, device=device)

    found, report = 1, predicted(1)
    low, high = 1, n_samples
    while report.fits(budget_bytes) and high - low > 1:
        middle = (low + high) // 2
        tried = predicted(middle)
        if tried.fits(budget_bytes):
            low = found = middle
            report = tried
        else:
            high = middle
    return found, n_samples, report


def _n_samples(batch: Any) -> int | None:
    sizes = {tensor.shape[0] for tensor in _tensors_in(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _cut(node: Any, start: int, stop: int) -> Any:
    if isinstance(node, Tensor):
        return node[start:stop] if node.dim() else node
    level = level_of(node)
    if level is None:
        return node
    return level.make([_cut(child, start, stop) for child in level.children])


def _tensors_in(node: Any) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    level = level_of(node)
    children = [] if level is None else level.children
    return [tensor for child in children for tensor in _tensors_in(child)]


def _send_back(result: Any) -> None:
    loss = getattr(result, "loss", None)
    losses = _tensors_in(loss if isinstance(loss, Tensor) else result)
    losses = [tensor for tensor in losses if tensor.requires_grad]
    if losses:
        autograd.backward(losses, [ones_like(tensor) for tensor in losses])
