"""The arguments of `step` as one thing, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from tenure._errors import AdaptiveUsageError
from tenure._graph_capture import accelerator_is_capturing
from tenure._torch.autograd import is_transformed

from .._callables import is_suspendable
from ._gradients import Backward, Scaler
from ._loss import Reduction
from ._samples import SampleDims

BatchNormPolicy = Literal["refuse", "per_chunk"]
_POLICIES, _REDUCTIONS = get_args(BatchNormPolicy), get_args(Reduction)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """The arguments of `step` or `check_split` that say what to run.

    Attributes:
        entry: what errors call the call, ``"step"``, ``"check_split"`` or ``"lazy"``.
        is_planned: whether modules exchange gradients with each micro-batch: see `PlannedRanks`.
    """

    entry: str
    fn: Callable[[Any], Any]
    batch: Any
    loss: Reduction | Callable[[Any], Any] = "mean"
    weight: Callable[[Any], object] | None = None
    then: Callable[..., Any] | None = None
    once: Callable[[], Any] | None = None
    model: nn.Module | Iterable[nn.Module] | None = None
    batchnorm: BatchNormPolicy = "refuse"
    scaler: Scaler | None = None
    backward: Backward | None = None
    in_dims: SampleDims = 0
    out_dims: SampleDims = 0
    has_aux: bool = False
    is_planned: bool = False

    def check(self) -> None:
        """Make sure that the arguments can be what they are for, and go together.

        Raises:
            AdaptiveUsageError: one of them is unknown, two don't go together, or a graph is being
                captured.
        """
        entry, loss, batchnorm, scaler = self.entry, self.loss, self.batchnorm, self.scaler
        # first, because what comes next may read numbers, which breaks the capture
        refuse_capture(entry)
        if is_transformed():
            raise AdaptiveUsageError(
                f"{entry}() was called inside a transform of torch.func, and runs backward itself. "
                "Call it outside, with a function that calls functional_call() and the transform."
            )
        _check_function(entry, "fn", self.fn)
        for name in ("weight", "then", "once", "backward"):
            if (function := getattr(self, name)) is not None:
                _check_function(entry, name, function)
        if callable(loss):
            _check_function(entry, "loss", loss)
            # with outputs the loss is the user's own, and nothing is left to weigh
            if self.weight is not None or self.then is not None:
                name = "then" if self.weight is None else "weight"
                raise AdaptiveUsageError(
                    f"{entry}() got {name}= with a loss= that is a function. That function gets "
                    f"the outputs of the whole batch: let it do what {name}= is for."
                )
        elif loss not in _REDUCTIONS:
            raise AdaptiveUsageError(
                f'{entry}() got loss={loss!r}. Say what the function returns, "mean" or "sum", or '
                "pass a function of its outputs."
            )
        # taken silently it would be ignored, and the user believe in it
        if self.weight is not None and loss == "sum":
            raise AdaptiveUsageError(
                f'{entry}() got weight= with loss="sum", and a sum has no weights. Leave one of '
                "them out."
            )
        if batchnorm not in _POLICIES:
            raise AdaptiveUsageError(
                f'{entry}() got batchnorm={batchnorm!r}. It is "refuse" or "per_chunk".'
            )
        # by what is used of it: scalers of other libraries, and those of torch for other devices,
        # have no common class
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise AdaptiveUsageError(
                f"{entry}() got a {type(scaler).__name__} as scaler=. Pass a torch.amp.GradScaler."
            )
        if scaler is not None and self.backward is not None:
            raise AdaptiveUsageError(
                f"{entry}() got scaler= and backward=, and would scale the loss before a function "
                "that may scale it too. Leave scaler= out and let the function scale, or leave "
                "backward= out if scaling is all that it does."
            )


def refuse_capture(entry: str) -> None:
    """Make sure that no graph is being captured.

    Raises:
        AdaptiveUsageError: one is.
    """
    if accelerator_is_capturing():
        raise AdaptiveUsageError(
            f"{entry}() was called while a graph is being captured: it notes random state, reads "
            "numbers and chooses sizes, which breaks the capture, or which no replay repeats. "
            "Capture forward and backward of one size without it, or call it outside."
        )


def _check_function(entry: str, name: str, function: object) -> None:
    if not callable(function):
        raise AdaptiveUsageError(
            f"{entry}() got a {type(function).__name__} as {name}=, which can't be called."
            + (" The function comes before the batch." if name == "fn" else "")
        )
    # it would return before it ran, and run out of memory where nothing tries again
    if is_suspendable(function):
        raise AdaptiveUsageError(
            f"{entry}() got {name}={function!r}, which does not run when it is called. Pass a "
            "plain function."
        )
