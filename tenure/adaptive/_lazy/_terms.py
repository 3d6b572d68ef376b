"""What a loss is over samples: a mean, a sum, or a mean over labels, and what that divides by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._meta import Label, names
from ._tape import RecordedCall, Value

Get = Callable[[Value], Any]

_COUNTED = (F.cross_entropy, F.nll_loss)
_LOSSES = frozenset(
    names(
        """
        mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits kl_div soft_margin_loss poisson_nll_loss
        gaussian_nll_loss cosine_embedding_loss margin_ranking_loss hinge_embedding_loss
        triplet_margin_loss multilabel_soft_margin_loss multilabel_margin_loss
        multi_margin_loss cross_entropy nll_loss
        """
    )
)


def reduction_of(entry: RecordedCall, labels: Mapping[Value, Label]) -> str:
    """Return the reduction that a call names: ``"sum"``, ``"mean"``, ``"counted"``, or nothing."""
    metas, name = entry.shape.metas, getattr(entry.func, "__name__", "")
    if len(metas) != 1 or metas[0].shape:
        return ""
    if name in ("sum", "mean"):
        return name
    if name not in _LOSSES:
        return ""
    given = _bound(entry)
    if given.get("reduce") is not None or given.get("size_average") is not None:
        return ""
    reduction: str = given.get("reduction", "mean")
    if reduction == "mean" and entry.func in _COUNTED:
        return "counted"
    # the weights of some losses divide their mean
    if given.get("weight") is not None:
        return ""
    if reduction == "batchmean":
        label = labels.get(given["input"], Label())
        # it divides by the size of the first dimension, which may be one of time
        return "mean" if label.dim == 0 else "sum"
    return reduction if reduction in ("sum", "mean") else ""


def count_of(entry: RecordedCall, reduces: str, get: Get, n_samples: int) -> Any:
    """Return what a term divides by.

    Args:
        entry: the call.
        reduces: its reduction.
        get: gives the tensor of a value.
        n_samples: how many samples there are.
    """
    if reduces != "counted":
        return n_samples
    given = _bound(entry)
    target: Any
    weight: Any
    target, weight = (
        get(each) if type(each) is Value else each
        for each in (given.get("target"), given.get("weight"))
    )
    # classes with probabilities: a mean over samples
    if target.is_floating_point():
        return n_samples
    with torch.no_grad():
        valid = target != given.get("ignore_index", -100)
        if weight is None:
            return valid.sum()
        return (weight[torch.where(valid, target, 0)] * valid).sum()


def reads_of_count(entry: RecordedCall) -> list[Value]:
    """Return the recorded values that its count is made of."""
    if entry.verdict.reduces != "counted":
        return []
    given = _bound(entry)
    values = (given.get("target"), given.get("weight"))
    return [value for value in values if type(value) is Value]


def whole_of(reduces: str, values: list[Tensor], counts: list[Any]) -> Tensor:
    """Return the value of a term, by its values for parts and what these divide by."""
    if reduces == "sum":
        return torch.stack(values).sum(0)
    weights = torch.stack([torch.as_tensor(each, device=values[0].device) for each in counts])
    # the mean of nothing is nan
    weighted = torch.where(weights > 0, widened(torch.stack(values)) * weights, 0)
    return (weighted.sum(0) / weights.sum(0)).to(values[0].dtype)


def widened(value: Tensor) -> Tensor:
    """Return a number in a precision in which sums of several are made."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


_signature_of = lru_cache(64)(inspect.signature)


def _bound(entry: RecordedCall) -> dict[str, Any]:
    return _signature_of(entry.func).bind(*entry.args, **entry.kwargs).arguments
