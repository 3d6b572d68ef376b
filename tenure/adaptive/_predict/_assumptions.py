"""What is taken for the result of an operation that can't be had without data.

Where the values are known it is what it will be. Else it is the largest result there can be, and a
guess where a number steers the program. See Note [Layouts in predictions], rule 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tenure._containers import passed_tensors
from tenure._errors import PredictionError
from tenure._torch.fakes import NEEDS_DATA, UNKNOWN, like, mode_of

from . import _cudnn_rnn
from ._known import KnownValues

_aten = torch.ops.aten
_Result = tuple[Any, str | None]
_EVERYTHING = "a mask is taken to select everything"
CAN_NOT: tuple[type[Exception], ...] = (*NEEDS_DATA, UNKNOWN)
"""What operations raise on tensors without data."""


def worked_out(
    func: Any, args: Any, kwargs: Any, known: KnownValues, error: BaseException
) -> _Result:
    """Return the result of an operation that raised, and what it assumes of values, if anything.

    Args:
        func: the operation.
        args: its arguments, tensors without data.
        kwargs: the others.
        known: values.
        error: what it raised.

    Raises:
        PredictionError: nothing can be said.
    """
    real = known.run(func, args, kwargs)
    if real is not None:
        return _without_data(real, args, known), None
    by_mask = _BY_MASK.get(func)
    if by_mask is not None:
        return by_mask(args[0], args[1], known)
    make = _LARGEST.get(func)
    if make is None:
        what = "no shape is known of it" if isinstance(error, UNKNOWN) else "it depends on values"
        raise PredictionError(
            f"The memory of this work can't be predicted: it calls {func}, and {what}. Predict the "
            "rest without that part, or run it once and see."
        ) from error
    return make(*args, **kwargs)


def _without_data(real: Any, args: Any, known: KnownValues) -> Any:
    if not isinstance(real, Tensor | list | tuple):
        return real
    if not isinstance(real, Tensor):
        return type(real)(_without_data(each, args, known) for each in real)
    first = next(passed_tensors(args))
    fake = like(real, mode_of(first), first.device)
    known.learn(fake, real)
    return fake


# --- by the largest there can be


def _item(tensor: Tensor) -> _Result:
    if tensor.dtype is torch.bool:
        return False, "a condition on values is taken to be false"
    # a loss that is logged: sizes are no floats
    if tensor.dtype.is_floating_point:
        return 1.0, None
    return 1, "a number is taken to be 1"


def _equal(tensor: Tensor, other: Tensor) -> _Result:
    return False, "a condition on values is taken to be false"


def _nonzero(tensor: Tensor) -> _Result:
    found = tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
    return found, "all elements are taken to be nonzero"


def _masked_select(tensor: Tensor, mask: Tensor, known: KnownValues) -> _Result:
    n_elements = torch.broadcast_shapes(tensor.shape, mask.shape).numel()
    n_true = known.n_true(mask)
    if n_true is None:
        return tensor.new_empty(n_elements), _EVERYTHING
    return tensor.new_empty(n_true * n_elements // max(mask.numel(), 1)), None


def _unique(tensor: Tensor, *_: Any, **__: Any) -> _Result:
    counts = tensor.new_empty(tensor.numel(), dtype=torch.int64)
    places = torch.empty_like(tensor, dtype=torch.int64)
    return (tensor.new_empty(tensor.numel()), places, counts), "all elements are taken to differ"


def _index(tensor: Tensor, indices: list[Tensor | None], known: KnownValues) -> _Result:
    """Return the number of true elements of a mask, or of all if they are not known."""
    columns: list[Tensor | None] = []
    reason = None
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            columns.append(index)
            continue
        n_selected = index.numel()
        n_true = known.n_true(index)
        if n_true is None:
            reason = _EVERYTHING
        else:
            n_selected = n_true
        columns += [index.new_empty(n_selected, dtype=torch.int64)] * index.dim()
    return _aten.index.Tensor(tensor, columns), reason


_BY_MASK: dict[Any, Callable[[Tensor, Any, KnownValues], _Result]] = {
    _aten.index.Tensor: _index,
    _aten.masked_select.default: _masked_select,
}
_LARGEST: dict[Any, Callable[..., _Result]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.equal.default: _equal,
    _aten.nonzero.default: _nonzero,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique,
}


# --- where torch knows no shape


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    # torch's own asks for what CUDA's kernel asks for
    groups = [] if offs is None or (a.dim() == 2) != (b.dim() == 2) else [offs.shape[0]]
    if a.dim() == b.dim() == 3:
        groups = [a.shape[0]]
    shape = (*groups, a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    n_samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    n_states = 2 * max(target_lengths, default=0) + 1
    alpha = log_probs.new_empty((n_samples, log_probs.shape[0], n_states))
    return log_probs.new_empty(n_samples), alpha


_NO_REDUCTION = 0


def _loss(func: Any, position: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return a loss in the memory of all its elements: the kernel computes them there first."""
    result: Tensor = func(*args, **kwargs)
    reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
    if reduction == _NO_REDUCTION:
        return result
    n_elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return _enlarged(result, n_elements)


def _like_input(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return a result in the memory of something like the input, which the kernel resizes."""
    return _enlarged(func(*args, **kwargs), args[0].numel())


def _enlarged(tensor: Tensor, n_elements: int) -> Tensor:
    if n_elements <= tensor.numel():
        return tensor
    return tensor.new_empty(n_elements).as_strided(tensor.shape, tensor.stride())


def _steps_in_place(*_: Any, **__: Any) -> None:
    """Step an optimizer in one kernel, which writes in place."""


STAND_INS: dict[Any, Callable[..., Any]] = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten._ctc_loss.default: _ctc_loss,
    **{
        getattr(step, overload): _steps_in_place
        for step in (_aten._fused_sgd_, _aten._fused_adagrad_)
        for overload in step.overloads()
    },
    **{
        func: partial(_loss, func, position)
        for func, position in (
            (_aten.mse_loss.default, 2),
            (_aten.smooth_l1_loss.default, 2),
            (_aten.soft_margin_loss.default, 2),
            (_aten.binary_cross_entropy.default, 3),
        )
    },
    **{func: partial(_like_input, func) for func in (_aten.col2im.default, _aten.im2col.default)},
    **_cudnn_rnn.KERNELS,
}
"""What gives the results of operations of which torch knows no shape, or that of CUDA's kernel, or
not all memory."""
