"""A step at a given size, once, as predictions run it; and the size that a step begins with.

Invariant: a prediction changes nothing, and one that fails leaves the step to begin as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._errors import PredictionError
from tenure._text import format_bytes
from tenure.scopes import DisposeScope

from .._memory import counting_on, meter_for
from .._predict import Forecast, observer_here
from .._sizes import AdaptiveSearch
from ._arguments import StepSpec
from ._modules import no_optimizer_steps
from ._parts import StepParts
from ._samples import SampleTree
from ._split import StepOutcome, run_at

# the first, one beside its gradients, one more, and the last with a partner of the one before
_ENOUGH = 5
# of more micro-batches, these show what each leaves behind
_FIRST, _LAST, _MANY = 6, 27, 32
# bytes of each in the tensor of all losses
_IN_ALL = 8


def step_at_size(spec: StepSpec, size: int) -> StepOutcome:
    """Run what `step` runs when this size fits; nothing is searched, verified or remembered.

    Args:
        spec: the arguments of the step.
        size: the samples of a micro-batch.

    Raises:
        BatchCoupledError: the batch would have to be split, and a module mixes its samples.
        AdaptiveUsageError: an argument, or what the function returns, can't be used.
    """
    spec.check()
    parts = StepParts(spec)
    state = parts.rollback()
    with DisposeScope("step") as scope, no_optimizer_steps(spec.entry):
        state.begin()
        try:
            outcome = run_at(parts, size)
        except BaseException:
            state.undo()
            raise
        state.finish()
        # as after a step: gradients, and what the function has kept, are not the block's
        if made := scope.owned():
            scope.move_to_outer(made)
    return outcome


class SizedStep:
    """A step at one size and another, on as many of its samples as tell what memory it takes.

    Args:
        spec: the step.

    Attributes:
        n_samples: the samples of its batch.
        reached: the functions and modules that it runs. A function that has them as a default is
            searched as they are, and what they use is named as their code names it.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        loss = spec.loss if callable(spec.loss) else None
        self.reached = (spec.fn, spec.model, loss, spec.then, spec.once)
        tree = self._tree(spec.batch)
        self.n_samples = tree.n_samples()
        # outputs pile up with each micro-batch, and so do gradients of parts of the batch
        self._piles_up = callable(spec.loss) or any(
            leaf.dim is not None and isinstance(leaf.value, Tensor) and leaf.value.requires_grad
            for leaf in tree.leaves
        )

    def length(self, size: int, *, is_long: bool = False) -> int:
        """Return the number of samples to run, because middle micro-batches are alike.

        Args:
            size: the samples of a micro-batch.
            is_long: whether to run enough for what micro-batches leave behind.
        """
        n, enough = self.n_samples, _MANY if is_long else _ENOUGH
        n_middle = 0 if self._piles_up else max(n // size - enough, 0)
        return n - n_middle * size

    def at(
        self,
        size: int,
        length: int,
        *,
        fn: Callable[[Any], Any] | None = None,
        done: Callable[[StepOutcome], None] | None = None,
    ) -> Callable[[Any], None]:
        """Return a function of the batch that runs the step on the first of its samples.

        Args:
            size: the samples of a micro-batch.
            length: how many samples are run.
            fn: runs instead of the step's own.
            done: gets what the step gives.
        """
        n_left = (self.n_samples - length) // size
        spec = self._spec if fn is None else replace(self._spec, fn=fn)
        if n_left:
            weight, n_run = spec.weight, -(-length // size)
            spec = replace(
                spec,
                fn=_in_proportion(spec.fn, n_run, n_left),
                weight=None if weight is None else _in_proportion(weight, n_run, n_left),
            )

        def run(batch: Any, _reached: Any = self.reached) -> None:
            part = batch if length == self.n_samples else self._first(batch, length)
            outcome = step_at_size(replace(spec, batch=part), size)
            if done is not None:
                done(outcome)

        return run

    def _first(self, batch: Any, length: int) -> Any:
        tree = self._tree(batch)
        # views: the batch is there as a whole
        return tree.with_leaves([leaf.part(0, length) for leaf in tree.leaves])

    def _tree(self, batch: Any) -> SampleTree:
        return SampleTree(batch, self._spec.in_dims, name="batch", argument="in_dims")


def _in_proportion(fn: Callable[[Any], Any], n_run: int, n_left: int) -> Callable[[Any], Any]:
    """Have a function count what micro-batches that are left out would leave behind.

    Args:
        fn: runs one micro-batch.
        n_run: how many are run, in each pass.
        n_left: how many are left out.
    """
    calls = count()
    before = 0

    def counting(samples: Any) -> Any:
        nonlocal before
        # of a step of two passes, each leaves something
        call = next(calls) % n_run
        if call == _FIRST:
            before = observer_here().live_bytes
        elif call == _LAST:
            each_bytes = (observer_here().live_bytes - before) // (_LAST - _FIRST)
            observer_here().add(n_left * max(each_bytes + _IN_ALL, 0))
        return fn(samples)

    return counting


_MOST_MICRO_BATCHES = 64
"""A step of more than that is not predicted as a whole: it takes as long as running it."""
_SHARE_OF_COMPILED = 7 / 8
"""The share of free memory that a prediction of eager code may fill if the code is compiled.
Compiled code was seen to take 1.07 times as much. If it takes less, the next call is larger."""


class ForeseenStep(NamedTuple):
    """The predictions of a step.

    Attributes:
        forecasts: for each device that can be measured.
        free: the bytes that were free.
    """

    forecasts: dict[str, Forecast]
    free: dict[str, int]

    @property
    def has_failed(self) -> bool:
        """True if no prediction of a device that can be measured worked."""
        return bool(self.forecasts) and not any(each.works for each in self.forecasts.values())

    def told(self, size: int) -> str:
        """Return the predicted bytes of a size in words; "" if nothing was predicted."""
        return "; ".join(
            f"predicted were {format_bytes(forecast(size))} of {format_bytes(self.free[device])} "
            f"that were free of {device}, for {size}"
            for device, forecast in self.forecasts.items()
            if forecast.works
        )


def foresee(search: AdaptiveSearch, parts: StepParts) -> ForeseenStep:
    """Let a search begin with the largest micro-batch that is predicted to fit.

    What is verified is no part of it: where there is no room for that, it gives way.
    """
    # a scaler would keep a scale without data, and a function of the user's is given losses of real
    # steps alone; neither takes memory to speak of
    step = SizedStep(replace(parts.spec, scaler=None, backward=None))
    # of a device that can't be measured nothing says what is free
    known = ((device, meter_for(str(device))) for device in parts.devices)
    meters = {device: meter for device, meter in known if meter is not None and meter.measures}
    # in a budget nothing is compiled
    may_compile = bool(parts.compiled) and not any(counting_on(str(each)) for each in meters)
    forecasts = {str(device): _forecast(step, parts, device) for device in meters}
    free = {str(device): meter.available_bytes() for device, meter in meters.items()}
    search.foresee(forecasts, share=_SHARE_OF_COMPILED if may_compile else 1.0)
    return ForeseenStep(forecasts, free)


def _forecast(step: SizedStep, parts: StepParts, device: torch.device) -> Forecast:
    def run(size: int, batch: Any, _reached: Any = step.reached) -> None:
        length = step.length(size)
        if length > _MOST_MICRO_BATCHES * size:
            raise PredictionError(f"It would have {length // size} micro-batches.")
        step.at(size, length)(batch)

    return Forecast(parts.name, run, parts.spec.batch, device=device)
