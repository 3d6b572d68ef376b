"""What is assumed of a result that depends on values, where a prediction has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenure._errors import PredictionError

_aten = torch.ops.aten


def assumed(func: Any, args: Any, kwargs: Any) -> tuple[Any, str | None]:
    """A result that takes as much memory as any, and what it assumes; or a guess of a number.

    Args:
        func: an operation whose result depends on values.
        args: its arguments, tensors without data.
        kwargs: the others.

    Raises:
        PredictionError: nothing can be said of its size.
    """
    make = _ASSUMED.get(func)
    if make is None:
        raise PredictionError(
            f"{func} gives a result whose size depends on values, and a prediction has none. "
            "Predict a part of the work without it, or measure one real run."
        )
    return make(*args, **kwargs)


def _item(tensor: Tensor) -> tuple[Any, str | None]:
    if tensor.dtype is torch.bool:
        return False, "a condition on values is taken to be false"
    if tensor.dtype.is_floating_point:
        # a loss that is logged: sizes are no floats
        return 1.0, None
    return 1, "a value is taken to be 1"


def _equal(tensor: Tensor, other: Tensor) -> tuple[bool, str]:
    return False, "a condition on values is taken to be false"


def _nonzero(tensor: Tensor) -> tuple[Tensor, str]:
    found = tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
    return found, "all elements are taken to be nonzero"


def _masked_select(tensor: Tensor, mask: Tensor) -> tuple[Tensor, str]:
    n_elements = torch.broadcast_shapes(tensor.shape, mask.shape).numel()
    return tensor.new_empty(n_elements), "a mask is taken to select everything"


def _index(tensor: Tensor, indices: list[Tensor | None]) -> tuple[Tensor, str]:
    columns: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            columns += [index.new_empty(index.numel(), dtype=torch.int64)] * index.dim()
        else:
            columns.append(index)
    return _aten.index.Tensor(tensor, columns), "a mask is taken to select everything"


def _unique(tensor: Tensor, *_: Any, **__: Any) -> tuple[Any, str]:
    indices = tensor.new_empty(tensor.numel(), dtype=torch.int64)
    found = (
        tensor.new_empty(tensor.numel()),
        torch.empty_like(tensor, dtype=torch.int64),
        indices,
    )
    return found, "all elements are taken to be different"


_ASSUMED: dict[Any, Callable[..., tuple[Any, str | None]]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.equal.default: _equal,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique,
}
