"""What a prediction says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenure._show import Report

from ._advice import Advised


@dataclass(frozen=True, slots=True)
class PeakReport(Advised, Report):
    """The memory that work takes at its worst moment.

    Attributes:
        peak_bytes: what is alive then, with what was there before.
        baseline_bytes: what was there before.
        categories: what is alive then, by what it is for.
        phase: what runs then: ``"forward"``, ``"backward"`` or ``"optimizer step"``.
        operation: the operation that runs then.
        place: the module and the line of the forward pass that it belongs to.
        device: whose memory it is.
        approximate: whether the figures may be wrong.
        reasons: why.
    """

    peak_bytes: int
    baseline_bytes: int
    categories: Mapping[str, int]
    phase: str
    operation: str
    place: str
    device: str
    approximate: bool
    reasons: tuple[str, ...]
