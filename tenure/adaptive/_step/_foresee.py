"""The size that a step begins with, by predictions of the step as it would run.

Invariant: a prediction changes nothing, and one that fails leaves the step to begin as without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tenure._errors import PredictionError
from tenure._text import format_bytes

from .._memory import counting_on, meter_for
from .._predict import Forecast
from .._sizes import AdaptiveSearch
from ._at_size import SizedStep
from ._split import StepParts, StepSpec

_MOST_MICRO_BATCHES = 64
"""A step of more than that is not predicted as a whole: it takes as long as running it."""
_SHARE_OF_COMPILED = 7 / 8
"""What predictions of eager code may fill where it is compiled: that was seen to take 1.07 times as
much. Where it takes less, the next call is larger by what the first one needed."""


class ForeseenStep(NamedTuple):
    """What was predicted.

    Attributes:
        forecasts: for each device that can be measured.
        free: the bytes that were free.
    """

    forecasts: dict[str, Forecast]
    free: dict[str, int]

    @property
    def has_failed(self) -> bool:
        """Whether no prediction of a device that can be measured worked."""
        return bool(self.forecasts) and not any(each.works for each in self.forecasts.values())

    def told(self, size: int) -> str:
        """Return the predicted bytes of a size in words; "" if nothing was predicted."""
        return "; ".join(
            f"predicted were {format_bytes(forecast(size))} of {format_bytes(self.free[device])} "
            f"that were free of {device}, for {size}"
            for device, forecast in self.forecasts.items()
            if forecast.works
        )


def foresee(search: AdaptiveSearch, spec: StepSpec, parts: StepParts) -> ForeseenStep:
    """Let a search begin with the largest micro-batch that is predicted to fit.

    What is verified is no part of it: where there is no room for that, it gives way.
    """
    # a scaler would keep a scale without data, and a function of the user's is given losses of real
    # steps alone; neither takes memory to speak of
    step = SizedStep(replace(spec, scaler=None, backward=None))
    # of a device that can't be measured nothing says what is free
    meters = {device: meter_for(str(device)) for device in parts.devices}
    measured = [device for device, meter in meters.items() if meter is not None and meter.measures]
    # in a budget nothing is compiled
    may_compile = bool(parts.compiled) and not any(counting_on(str(each)) for each in measured)
    forecasts = {str(device): _forecast(step, parts, device) for device in measured}
    free = {str(each): meter.available_bytes() for each, meter in meters.items() if meter}
    search.foresee(forecasts, share=_SHARE_OF_COMPILED if may_compile else 1.0)
    return ForeseenStep(forecasts, free)


def _forecast(step: SizedStep, parts: StepParts, device: torch.device) -> Forecast:
    def run(size: int, batch: Any, _reached: Any = step.reached) -> None:
        length = step.length(size)
        if length > _MOST_MICRO_BATCHES * size:
            raise PredictionError(f"It would have {length // size} micro-batches.")
        step.at(size, length)(batch)

    return Forecast(parts.name, run, parts.spec.batch, device=device)
