"""What the user asked of a step, and what a step reads of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .._gradients import Scaler
from .._loss import Reduction
from .._samples import SampleDims

BatchNormPolicy = Literal["refuse", "per_chunk"]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The arguments of `step` that say what its loss is.

    Attributes:
        entry: what errors call the call, ``"step"`` or ``"check_split"``.
    """

    entry: str
    fn: Callable[[Any], Any]
    loss: Reduction | Callable[[Any], Any]
    weight: Callable[[Any], object] | None
    then: Callable[..., Any] | None
    once: Callable[[], Any] | None
    batchnorm: BatchNormPolicy
    out_dims: SampleDims
    scaler: Scaler | None


class Chunk(NamedTuple):
    """A run of samples of the batch."""

    start: int
    length: int
