"""What a prediction says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenure._show import Report


@dataclass(frozen=True, slots=True)
class PeakReport(Report):
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
        allocated_bytes: what the blocks of the device's caching allocator take then, each rounded
            up; None on the CPU, which has none.
        reserved_bytes: the most that this allocator takes from the device; None on the CPU.
        allowance_bytes: what kernels of which nothing is known may take on top, at the most.
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
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    allowance_bytes: int = 0
