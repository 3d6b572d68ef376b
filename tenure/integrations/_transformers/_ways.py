"""How the loss of a batch may add up from those of its parts.

Most models divide a sum by ``num_items_in_batch``; many take it and divide by a count of their own.
Which it is tells no name, so that these are guesses, the likeliest first, and whoever uses one
has to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ._prediction import Batch, Weight

_IGNORED = -100


def ways_of(trainer: Trainer, inputs: Any, *, has_n_items: bool) -> dict[str, dict[str, Any]]:
    """What a loss may be, the likeliest first; `step` tells which of them it is not."""
    total = {"sum": {"loss": "sum"}}
    means: dict[str, dict[str, Any]] = {}
    if _has_labels_to_count(inputs):
        likely, other = (1, 0) if _shifts_labels(trainer) else (0, 1)
        for shift in (likely, other):
            means[f"valid labels from {shift}"] = {"weight": _counting(shift)}
    means["samples"] = {}
    # what divides by the count of all batches is a sum of each; a loss may not use that count
    return total | means if has_n_items else means | total


def _has_labels_to_count(inputs: Any) -> bool:
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    if not isinstance(labels, Tensor) or not labels.dim():
        return False
    return not (labels.is_floating_point() or labels.is_complex())


def _shifts_labels(trainer: Trainer) -> bool:
    # told by newer trainers; before, and for label smoothing, by the name of the model
    told = getattr(trainer, "_loss_shifts_labels", False)
    return told or type(trainer.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _counting(shift: int) -> Callable[[Any], Tensor]:
    def n_valid(batch: Any) -> Tensor:
        labels: Tensor | None = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"]
            assert labels is not None
            labels = labels[..., shift:] if labels.dim() > 1 else labels
        return labels.ne(_IGNORED).sum()

    return n_valid


def weights_of(trainer: Trainer, inputs: Any, in_dims: Any) -> dict[str, Weight | None]:
    """What the loss of an evaluation may be a mean over; None for a sum."""
    weights: dict[str, Weight | None] = {}
    # what each version divides by
    count, device = getattr(trainer, "_get_num_items_in_batch", None), trainer.args.device
    if count and count([inputs], device) is not None:
        weights["items"] = lambda part: count([part], device)
    ways = ways_of(trainer, inputs, has_n_items=False)

    def n_samples(part: Any) -> int:
        return Batch(part, in_dims).n_samples

    return weights | {
        name: None if "loss" in way else way.get("weight", n_samples) for name, way in ways.items()
    }
