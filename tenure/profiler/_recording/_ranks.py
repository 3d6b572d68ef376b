"""The recordings of several ranks as one view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tenure._errors import ReportFormatError
from tenure._show import Column, Paragraph, Part, Report, Table, in_bytes

from ._recording import Recording

_COLUMNS = (
    Column("rank"),
    Column("ended"),
    Column("seconds", ">", spare=1),
    Column("device"),
    Column("at most", ">"),
    Column("at the end", ">"),
)


@dataclass(frozen=True, slots=True, repr=False)
class RecordedRanks(Report):
    """Several recordings, side by side.

    Attributes:
        recordings: those of ranks in the order of the ranks.
    """

    recordings: tuple[Recording, ...]

    _is_spaced = True

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Self:
        """Put recordings in order."""
        return cls(tuple(sorted(recordings, key=lambda each: (each.rank is None, each.rank or 0))))

    @property
    def largest(self) -> Recording:
        """The one with the highest peak; of several, the first."""
        return max(self.recordings, key=lambda each: max(each.peaks.values(), default=0))

    def __repr__(self) -> str:
        return f"<RecordedRanks of {len(self.recordings)} recordings>"

    def _parts(self) -> list[Part]:
        rows = [row for i, each in enumerate(self.recordings) for row in _rows(i, each)]
        are_ranks = any(each.rank is not None for each in self.recordings)
        columns = (_COLUMNS[0] if are_ranks else Column("run"), *_COLUMNS[1:])
        ranks: list[Part] = [Table(f"{len(self.recordings)} recordings", columns, rows)]
        if not are_ranks:
            names = (f"{i}  {each.title()}" for i, each in enumerate(self.recordings))
            ranks.insert(0, Paragraph("", "\n".join(names)))
        # The others do the same, or the table says how they differ.
        return [*ranks, *self.largest._parts()]

    def _facts(self) -> dict[str, Any]:
        return {"recordings": [each.to_dict() for each in self.recordings]}

    @classmethod
    def _of_facts(cls, facts: Mapping[str, object]) -> Self:
        found = facts.get("recordings")
        if not isinstance(found, list):
            raise ReportFormatError(f"{cls.__name__}.recordings is missing. Write it anew.")
        return cls(tuple(map(Recording.from_dict, found)))


def _rows(index: int, recording: Recording) -> list[tuple[str, ...]]:
    at_end = {}
    if recording.memory is not None:
        at_end = {device.device: device.total_bytes for device in recording.memory.devices}
    name = str(index if recording.rank is None else recording.rank)
    head = (name, recording.ended, f"{recording.duration_s:.1f}")
    devices = sorted(recording.peaks.keys() | at_end.keys()) or [""]
    return [
        (
            *(head if i == 0 else ("", "", "")),
            device,
            in_bytes(recording.peaks[device]) if device in recording.peaks else "",
            in_bytes(at_end[device]) if device in at_end else "",
        )
        for i, device in enumerate(devices)
    ]
