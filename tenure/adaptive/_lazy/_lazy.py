"""The one line: tensors that are recorded, and run in parts where they don't fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.compiler import never_compiled

from ._label import SHARED, Label
from ._shapes import rebuilt
from ._tape import Tape
from ._tensor import LazyTensor, lazy_leaf


@never_compiled
def lazy(*values: Any, batch: int | None = 0, predict: bool = False) -> Any:
    """Record what is done with tensors, and run it in micro-batches where it does not fit.

    Args:
        *values: tensors, or lists, tuples and dicts of them; other things come back as they are.
        batch: the dimension that has the samples; None: all samples share these tensors.
        predict: begin a program that is new with the size that `predict_peak` says fits, where
            memory can be measured; as for `step`. In the meantime the parameters have no data, for
            other threads as well. Otherwise it begins with the whole batch.

    Returns:
        The same with a recorded tensor for each; a tuple where several were given.

    Raises:
        AdaptiveUsageError: a tensor can't be recorded, or has no such dimension.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import lazy
        >>> model = nn.Linear(4, 1)
        >>> x, y = lazy(torch.randn(8, 4), torch.randn(8, 1))
        >>> loss = nn.functional.mse_loss(model(x), y)
        >>> loss
        lazy float32[] on cpu, not computed yet
        >>> loss.backward()
        >>> model.weight.grad.shape
        torch.Size([1, 4])
    """
    tapes: dict[int, Tape] = {}
    made = tuple(_recorded(value, batch, tapes) for value in values)
    for tape in tapes.values():
        tape.predicts = predict
    return made[0] if len(made) == 1 else made


def _recorded(value: Any, batch: int | None, tapes: dict[int, Tape]) -> Any:
    if isinstance(value, LazyTensor):
        return value
    if isinstance(value, Tensor):
        return _leaf(value, batch, tapes)
    if isinstance(value, list | tuple):
        return rebuilt(value, [_recorded(each, batch, tapes) for each in value])
    if isinstance(value, dict):
        return type(value)({key: _recorded(each, batch, tapes) for key, each in value.items()})
    return value


def _leaf(tensor: Tensor, batch: int | None, tapes: dict[int, Tape]) -> LazyTensor:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise AdaptiveUsageError(
            f"lazy() got a tensor that is not dense, {describe_tensor(tensor)}. Pass a dense one, "
            "or use step()."
        )
    label, n_samples = SHARED, -1
    if batch is not None:
        if not -tensor.dim() <= batch < tensor.dim():
            raise AdaptiveUsageError(
                f"lazy() got {describe_tensor(tensor)}, which has no dimension {batch} for its "
                "samples. Pass it with batch=None if all samples share it."
            )
        dim = batch % tensor.dim()
        label, n_samples = Label(dim), tensor.shape[dim]
    tape = tapes.setdefault(n_samples, Tape(n_samples, tensor.device.type))
    return lazy_leaf(tensor, tape, label)
