"""Tensors without data that stand for what a call gets, at any number of samples.

Invariant: nothing here holds a tensor of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._label import Label
from ._meta import Meta


def fake_of(meta: Meta, n: int | None) -> Any:
    """A tensor without data like a recorded one, at any number of samples; None: at its own."""
    return _empty(meta, n, meta.label)


def fake_of_plain(tensor: Tensor, n: int | None, cut: Label) -> Any:
    """The same of a tensor that was not recorded, and may be cut with the batch."""
    return _empty(tensor, n, cut)


def _empty(like: Any, n: int | None, label: Label) -> Any:
    shape = list(like.shape)
    # a recorded tensor keeps its own
    stride = tuple(like.stride() if isinstance(like, Tensor) else like.stride)
    if n is not None and label.is_batch:
        shape[label.dim] = label.size(n)
        stride = tuple(_strides(shape, stride))
    with torch.no_grad():
        made = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
    if n is None and like.requires_grad:
        made.requires_grad_()
        if not like.is_leaf:
            with torch.enable_grad():
                made = made.clone()
            if made.stride() != stride:
                made = made.as_strided(shape, stride)
    return made


def _strides(shape: list[int], like: Sequence[int]) -> list[int]:
    """Dense strides in the order of others."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        if like[d]:
            strides[d], step = step, step * max(shape[d], 1)
    return strides


def with_tensors(value: Any, by_id: dict[int, Any]) -> Any:
    """Arguments with other tensors in place of those that were not recorded."""
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)([with_tensors(each, by_id) for each in value])
    if type(value) is dict:
        return {key: with_tensors(each, by_id) for key, each in value.items()}
    return value
