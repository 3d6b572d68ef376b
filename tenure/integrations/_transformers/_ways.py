"""How the loss of a batch may add up from those of its parts.

Most models divide a sum by ``num_items_in_batch``; many take it and divide by a count of their own.
No name tells which it is: these are guesses, the likeliest first, and whoever uses one compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tenure._errors import SplitMismatchError

from ._prediction import DECLARED, Batch, Weight, Weights

_IGNORED = -100
_OF_LABELS = ("a mean over valid labels", "a mean over valid labels, shifted by one")

# what is for those who write the function of a step themselves
_OF_FUNCTIONS = "Return the outputs, one"


def ways_of(trainer: Trainer, inputs: Any, *, has_n_items: bool) -> dict[str, dict[str, Any]]:
    """Options of `step` for what a loss may be, the likeliest first; it tells which it is not."""
    total = {"a sum that num_items_in_batch divides": {"loss": "sum"}}
    means: dict[str, dict[str, Any]] = {}
    if _has_labels_to_count(inputs):
        likely, other = (1, 0) if _shifts_labels(trainer) else (0, 1)
        for shift in (likely, other):
            means[_OF_LABELS[shift]] = {"weight": _counting(shift)}
    means["a mean over samples"] = {}
    # what divides by the count of all batches is a sum of each; a loss may not use that count
    return total | means if has_n_items else means | total


def mismatch_of(name: str, mismatches: Mapping[str, SplitMismatchError]) -> SplitMismatchError:
    """Return the error for a loss that none of the tried ways explains.

    Args:
        name: of the trainer's class.
        mismatches: what each way differs by, by the name of the way.
    """

    def error_of(way: str) -> float:
        found = mismatches[way]
        error = abs(found.split - found.whole) / (abs(found.whole) or 1.0)
        return error if math.isfinite(error) else math.inf

    closest = min(mismatches, key=error_of)
    found = mismatches[closest]
    told = found.advice.partition(_OF_FUNCTIONS)[0].strip()
    advice = (
        f"{name} tried the loss as {'; as '.join(mismatches)}. The closest is told, {closest}. Say "
        "what else the mean of your loss divides by, of the batch alone. Where classes have "
        'weights: adaptive_options = {"weight": lambda b: class_weights[b["labels"]].sum()}, in '
        f'the class of the trainer; of a sum: adaptive_options = {{"loss": "sum"}}. {told}'
    ).rstrip()
    message = str(found).removesuffix(found.advice) + advice
    return SplitMismatchError(message, found.whole, found.split, advice)


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


def weights_of(trainer: Any, inputs: Any, in_dims: Any) -> Weights:
    """Return the counts that the loss of an evaluation may be a mean over."""
    weights: dict[str, Weight | None] = {}
    if callable(declared := trainer.adaptive_options.get("weight")):
        weights[DECLARED] = declared
    # num_items_in_batch as the Trainer counts it, which differs from version to version
    count, device = getattr(trainer, "_get_num_items_in_batch", None), trainer.args.device
    if count and count([inputs], device) is not None:
        weights["items"] = lambda part: count([part], device)
    ways = ways_of(trainer, inputs, has_n_items=False)

    def n_samples(part: Any) -> int:
        return Batch(part, in_dims).n_samples

    return weights | {
        name: None if "loss" in way else way.get("weight", n_samples) for name, way in ways.items()
    }
