"""What `step` refuses before it runs, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from tenure._capture import accelerator_is_capturing
from tenure._errors import AdaptiveUsageError

from ..._callables import is_suspendable
from .._gradients import Scaler
from .._loss import Reduction
from .._samples import SampleDims
from ._spec import BatchNormPolicy, StepSpec


def checked_spec(
    entry: str,
    fn: Callable[[Any], Any],
    loss: Reduction | Callable[[Any], Any],
    weight: Callable[[Any], object] | None,
    then: Callable[..., Any] | None,
    once: Callable[[], Any] | None,
    batchnorm: BatchNormPolicy,
    out_dims: SampleDims,
    scaler: Scaler | None,
) -> StepSpec:
    """The arguments of `step` or `check_split`, which is the ``entry``, as one thing.

    Raises:
        AdaptiveUsageError: one of them is unknown, two don't go together, or a graph is being
            captured.
    """
    _refuse_capture(entry)
    _check_function(entry, "fn", fn)
    for name, function in (("weight", weight), ("then", then), ("once", once)):
        if function is not None:
            _check_function(entry, name, function)
    if callable(loss):
        _check_function(entry, "loss", loss)
        _refuse_beside_outputs(entry, weight, then)
    elif loss not in get_args(Reduction):
        raise AdaptiveUsageError(
            f'{entry}() got loss={loss!r}. Say what the function returns, "mean" or "sum", or pass '
            "a function of its outputs."
        )
    if weight is not None and loss == "sum":
        raise AdaptiveUsageError(
            f'{entry}() got weight= with loss="sum", and a sum has no weights. Leave one of '
            "them out."
        )
    if batchnorm not in get_args(BatchNormPolicy):
        raise AdaptiveUsageError(
            f'{entry}() got batchnorm={batchnorm!r}. It is "refuse" or "per_chunk".'
        )
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise AdaptiveUsageError(
            f"{entry}() got a {type(scaler).__name__} as scaler=. Pass a torch.amp.GradScaler."
        )
    return StepSpec(entry, fn, loss, weight, then, once, batchnorm, out_dims, scaler)


def _refuse_capture(entry: str) -> None:
    if accelerator_is_capturing():
        raise AdaptiveUsageError(
            f"{entry}() was called while a graph is being captured: it notes random state, reads "
            "numbers and chooses sizes, which breaks the capture, or which no replay repeats. "
            "Capture forward and backward of one size without it, or call it outside."
        )


def _refuse_beside_outputs(entry: str, weight: object, then: object) -> None:
    name = "weight" if weight is not None else "then" if then is not None else None
    if name is not None:
        raise AdaptiveUsageError(
            f"{entry}() got {name}= with a loss= that is a function. That function gets the "
            f"outputs of the whole batch: let it do what {name}= is for."
        )


def _check_function(entry: str, name: str, function: object) -> None:
    if not callable(function):
        raise AdaptiveUsageError(
            f"{entry}() got a {type(function).__name__} as {name}=, which can't be called."
        )
    if is_suspendable(function):
        raise AdaptiveUsageError(
            f"{entry}() got {name}={function!r}, which does not run when it is called. Pass a "
            "plain function."
        )
