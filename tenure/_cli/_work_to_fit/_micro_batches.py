"""The largest micro-batch of a step that fits: `plan`, for whatever a training step returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tenure._containers import tensors_in
from tenure.adaptive import AdaptiveUsageError, BatchCoupledError, OutOfRetriesError, plan


class MicroBatch(NamedTuple):
    """In what a batch would run that does not fit as a whole.

    Attributes:
        size: the most samples at a time; where nothing fits, how many take least.
        n_samples: those of the batch.
        needed_bytes: what the step needs then.
        fits: whether there is room for it, if need be once the allocator gives back what it caches.
    """

    size: int
    n_samples: int
    needed_bytes: int
    fits: bool


def largest_micro_batch(
    fn: Callable[[Any], Any],
    batch: Any,
    optimizer: Optimizer | None,
    device: str | None,
    budget_bytes: int,
) -> MicroBatch | None:
    """Find out in which micro-batches a step fits whose whole batch does not.

    Args:
        fn: gives the loss of a batch, or whatever `predict_peak` runs backward.
        batch: tensors of any dtype whose first dimension has one size, in containers of any kind.
        optimizer: steps at the end; or None.
        device: as of `plan`.
        budget_bytes: what there is.

    Returns:
        The largest that fits, else the one that takes least. None where the batch can't be split.
    """
    try:
        # a loop that sums gradients up by hand takes the samples of a norm as they come, too
        found = plan(
            _with_a_loss(fn),
            batch,
            budget_bytes,
            margin=0,
            optimizer=optimizer,
            device=device,
            batchnorm="per_chunk",
        )
    except OutOfRetriesError as error:
        # the whole was the first that was tried
        n_samples = error.sizes[0]
        if n_samples < 2 or error.least is None:
            return None
        return MicroBatch(error.least[0], n_samples, error.least[1], fits=False)
    except (AdaptiveUsageError, BatchCoupledError):
        return None
    return MicroBatch(found.micro_batch, found.n_samples, found.needed_bytes, fits=True)


def _with_a_loss(fn: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    """One number, which `step` wants, of all that a prediction runs backward."""

    def loss_of(batch: Any) -> Tensor:
        result = fn(batch)
        # as libraries return it, beside logits that nobody runs backward
        loss = getattr(result, "loss", None)
        losses = tensors_in([loss if isinstance(loss, Tensor) else result])
        losses = [each for each in losses if each.requires_grad]
        sums = [each if each.numel() == 1 else each.sum() for each in losses]
        # inference has none, and a step wants one that it can run backward
        return sum(sums[1:], sums[0]) if sums else torch.zeros((), requires_grad=True)

    return loss_of
