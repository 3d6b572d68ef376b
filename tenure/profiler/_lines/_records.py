"""What a line profiler found: plain values, one record for each line that ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from tenure._show import plain, restored


@dataclass(frozen=True, slots=True)
class LineRecord:
    """What one line of a profiled function did, summed over its hits.

    What a line calls counts for the lines of the called function if that is profiled too, so that
    the records of all functions add up to what the allocator did; only ``peak_bytes`` covers it.

    Attributes:
        function: the qualified name of the function.
        line: the line's number in its file.
        hits: how often the line was begun.
        allocated_bytes: bytes that were allocated, those of temporaries inside operations too.
        freed_bytes: bytes that were freed. What the variables of a function held is freed on the
            line that returned.
        peak_bytes: the most that was live at once while the line ran, above what was live when the
            profiler was enabled.
        device: the device that is meant.
        exact: False where another profiler kept the allocator's events to itself: the line has
            allocated and freed at least as much as it says; or where it is ``shared``.
        shared: True where other threads used the device while the line ran, and its counters don't
            tell whose is what: some of the line's bytes may stand on their lines, or theirs here.
            Together the lines of all threads add up. Never ``exact``.
        peak_exact: False where the peak is only known to be at least as high.
        source: the line as it stands in the file; empty where there is none.
        file: the path of the file.
        statistics: the largest value of each field of the device's ``memory_stats()``; empty for
            the CPU, which has none.
    """

    function: str
    line: int
    hits: int
    allocated_bytes: int
    freed_bytes: int
    peak_bytes: int
    device: torch.device
    exact: bool = True
    shared: bool = False
    peak_exact: bool = True
    source: str = ""
    file: str = ""
    statistics: Mapping[str, int] = field(default_factory=dict, repr=False)

    _figures: ClassVar = ("net_bytes",)

    @property
    def net_bytes(self) -> int:
        """By how much live memory grew; negative where it shrank."""
        return self.allocated_bytes - self.freed_bytes

    def to_dict(self) -> dict[str, Any]:
        """The record as values that JSON has."""
        facts: dict[str, Any] = plain(self)
        return facts

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Read a record that ``to_dict`` gave, in this process or in another one.

        Raises:
            ReportFormatError: something is missing, or is no such value.
        """
        record: Self = restored(cls, data, cls.__name__)
        return record
