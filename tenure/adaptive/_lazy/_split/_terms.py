"""What the mean of a loss over labels divides by: the valid ones, or the sum of their weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .._tape import Entry, Ref, filled

Get = Callable[[int], Any]


def count_of(entry: Entry, get: Get, n_samples: int) -> Any:
    """What a call of `cross_entropy` or `nll_loss` divides by.

    Args:
        entry: the call.
        get: gives a recorded value by its number.
        n_samples: how many samples there are.
    """
    given = _bound(entry)
    target, weight = (filled(given.get(name), get, n_samples) for name in ("target", "weight"))
    # classes with probabilities: a mean over samples
    if target.is_floating_point():
        return n_samples
    with torch.no_grad():
        valid = target != given.get("ignore_index", -100)
        if weight is None:
            return valid.sum()
        return (weight[torch.where(valid, target, 0)] * valid).sum()


def reads_of_count(entry: Entry) -> list[int]:
    """The recorded values that it is counted by."""
    if entry.shape.metas[0].label.kind != "counted":
        return []
    given = _bound(entry)
    values = (given.get("target"), given.get("weight"))
    return [value.number for value in values if type(value) is Ref]


def _bound(entry: Entry) -> dict[str, Any]:
    return inspect.signature(entry.func).bind(*entry.args, **entry.kwargs).arguments
