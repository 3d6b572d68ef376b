"""The live bytes of one device over time, and what was alive at their peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tenure._show import Record

from .._timeline import DeviceTimeline, PeakRow

# A terminal shows less, and a page not much more.
_MOST_POINTS = 1000


@dataclass(frozen=True, slots=True, repr=False)
class Track(Record):
    """The live bytes of a device.

    Attributes:
        device: the device, as ``cuda:0``.
        times_s: moments since the beginning.
        live_bytes: the most between each of them and the one before it.
        peak_bytes: the most of all.
        peak_at_s: when that was.
        at_peak: what was alive then, the largest first.
    """

    device: str
    times_s: tuple[float, ...]
    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_at_s: float
    at_peak: tuple[PeakRow, ...]

    @classmethod
    def of(cls, device: DeviceTimeline) -> Track:
        """That of a device of a timeline."""
        return cls(
            device.device,
            device.times_s,
            device.live_bytes,
            device.peak_bytes,
            device.peak_at_s,
            device.at_peak,
        )


def thinned(
    times_s: Sequence[float], live_bytes: Sequence[int], most: int = _MOST_POINTS
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """At most so many moments, each with the most since the one before it."""
    n = len(times_s)
    if n <= most:
        return tuple(times_s), tuple(live_bytes)
    ends = [(i + 1) * n // most for i in range(most)]
    begins = [0, *ends[:-1]]
    highest = tuple(max(live_bytes[a:b]) for a, b in zip(begins, ends, strict=True))
    return tuple(times_s[end - 1] for end in ends), highest


def summed(blocks: Iterable[PeakRow]) -> tuple[PeakRow, ...]:
    """PeakRows of the same place as one, the largest first."""
    found: dict[tuple[str, str, tuple[str, ...]], tuple[int, int]] = {}
    for block in blocks:
        key = block.category, block.scope, block.stack
        n_bytes, n = found.get(key, (0, 0))
        found[key] = n_bytes + block.n_bytes, n + block.n_storages
    all_of_them = (PeakRow(*key, *figures) for key, figures in found.items())
    return tuple(sorted(all_of_them, key=lambda block: (-block.n_bytes, block.stack)))
