"""What is known of one device: its level, the storages alive on it, the lives of those that were.

The level of an accelerator is told by the counters of its allocator, which are dear to read.
Invariants: an entry is a weak reference, and goes with its storage; no counter is reset, so what is
highest between two readings is known as long as the counter of the peak rises, and one that stands
higher from before hides it.
"""

from __future__ import annotations

import time
import weakref

import torch
from torch import UntypedStorage

from tenure._cuda_blocks import BLOCK_BYTES, up_to
from tenure._stream import allocated_in, counters_of
from tenure._text import format_bytes

from ._categories import UNKNOWN, Outliving, told_by_life
from ._lives import FOREVER, Life, Lives
from ._series import Series

# a reading for fifty times as long as it takes, unless there may be a new peak
_SHARE = 50


class Entry(weakref.ref[UntypedStorage]):
    """A storage of which notes are taken.

    Attributes:
        key: its address in C++, unique while it lives.
        account: that of its device.
        n_bytes: the bytes that it takes.
        asked_bytes: those that it has; less where the allocator rounds.
        place: where it was made.
        scope: the scope that it was made in.
        category: what a census says that it counts as.
        begin: the first moment that it counts in.
        in_backward: whether a backward pass made it.
        went_in_backward: whether it has gone while one ran.
        is_input: whether the program brought its data in.
        is_foreign: whether its memory is none of the allocator's.
    """

    __slots__ = (
        "account", "asked_bytes", "begin", "category", "in_backward", "is_foreign", "is_input",
        "key", "n_bytes", "place", "scope", "went_in_backward",
    )  # fmt: skip

    key: int
    account: Account
    n_bytes: int
    asked_bytes: int
    place: int
    scope: int
    category: int
    begin: int
    in_backward: bool
    went_in_backward: bool
    is_input: bool
    is_foreign: bool


class Account:
    """One device.

    Args:
        device: the device, with its index.
        outliving: what is known of storages that outlive steps.

    Attributes:
        series: the moments that are kept.
        lives: the storages that were alive at them.
        began_bytes: what was in use when the recording began.
        known_bytes: of the storages that are known and alive.
        foreign_bytes: of those beside them whose memory is none of the allocator's.
        most_foreign_bytes: the most that has been.
        levels: the counters of an accelerator; None for the host, whose level is told by events.
    """

    def __init__(self, device: torch.device, outliving: Outliving) -> None:
        self.device = device
        self._outliving = outliving
        self.series = Series()
        self.lives = Lives(self.series)
        self.began_bytes = 0
        self.known_bytes = self.foreign_bytes = self.most_foreign_bytes = 0
        self.levels = None if device.type == "cpu" else _levels_of(device)

    def begin(self) -> None:
        """All that was alive is known."""
        self.began_bytes = self.known_bytes
        if self.levels is not None:
            self.levels.begin(self.known_bytes)

    def came(self, entry: Entry) -> None:
        """Count a storage."""
        if entry.is_foreign:
            self.foreign_bytes += entry.n_bytes
            self.most_foreign_bytes = max(self.most_foreign_bytes, self.foreign_bytes)
            return
        entry.n_bytes = _block_bytes(entry.n_bytes, self.device)
        self.known_bytes += entry.n_bytes

    def went(self, entry: Entry) -> None:
        """Count it no more."""
        if entry.is_foreign:
            self.foreign_bytes -= entry.n_bytes
        else:
            self.known_bytes -= entry.n_bytes

    def look(self, number: int, at_ns: int, *, is_last: bool = False) -> None:
        """Note the level of a moment, where counters tell it."""
        if self.levels is not None:
            self.levels.known_bytes = self.known_bytes
            level = self.levels.read() if is_last else self.levels.look()
        elif self.device.type == "cpu":
            return
        else:
            level = self.known_bytes
        self.series.add(number, at_ns, level)

    def tell(self, entry: Entry, end: int) -> None:
        """Put the life of a storage down; with no end it is alive when the recording ends."""
        if entry.is_foreign or entry.begin >= end:
            return
        # All moments before the end are told: most lives are over before one of them is kept.
        if end != FOREVER and (not self.series.moments or self.series.moments[-1] < entry.begin):
            return
        told = entry.category
        if told == UNKNOWN:
            told = self._outliving.told(entry.place, entry.asked_bytes, entry.begin, end)
        category = told_by_life(
            told,
            came_in_backward=entry.in_backward,
            went_in_backward=end != FOREVER and entry.went_in_backward,
            is_input=entry.is_input,
        )
        self.lives.add(Life(entry.begin, end, entry.n_bytes, entry.place, entry.scope, category))

    def notes(self, excess_bytes: int) -> list[str]:
        """What is not quite as it seems.

        Args:
            excess_bytes: what storages showed beyond what the allocator had in use, at the most.
        """
        found = []
        if self.most_foreign_bytes:
            found.append(
                f"{format_bytes(self.most_foreign_bytes)} of tensors on {self.device} lay in "
                "memory of numpy, of a file or of another process, which no allocator counts"
            )
        if excess_bytes:
            found.append(
                f"storages on {self.device} showed up to {format_bytes(excess_bytes)} more than "
                "its allocator had in use; that is taken off the largest parts"
            )
        if self.levels is None and self.device.type != "cpu":
            found.append(f"{self.device} does not count: what tensors show stands for its level")
        elif self.levels is not None and self.levels.earlier_peak_bytes > max(self.series.levels):
            found.append(
                f"{self.device} has counted a higher peak before: temporaries inside operations "
                "were not seen there; reset_peak_memory_stats() before the block lets them be seen"
            )
        return found


class DeviceLevels:
    """What is in use on one device.

    Args:
        device: a device whose module has ``memory_stats()``.

    Attributes:
        known_bytes: of the storages that are known to be alive, in whole blocks.
        earlier_peak_bytes: where the counter of the peak stood when the recording began.
    """

    def __init__(self, device: torch.device) -> None:
        self.known_bytes = 0
        self._device = device
        figures = allocated_in(counters_of(device))
        self.earlier_peak_bytes = self._peak_bytes = figures.peak
        self._level_bytes, self._known_then = figures.current, 0
        self._highest = figures.current
        self._next_ns = 0

    @property
    def level_bytes(self) -> int:
        """What is in use: as last read, and what has come and gone since that is known."""
        return self._level_bytes + self.known_bytes - self._known_then

    def begin(self, known_bytes: int) -> None:
        """Say what of the level at the beginning is known."""
        self.known_bytes = self._known_then = known_bytes

    def look(self) -> int:
        """The most that has been in use since the last look, as far as it is known."""
        level = self.level_bytes
        if level <= self._highest and time.perf_counter_ns() < self._next_ns:
            return level
        return self.read()

    def read(self) -> int:
        """The same from the counters, however dear."""
        began_ns = time.perf_counter_ns()
        figures = allocated_in(counters_of(self._device))
        ended_ns = time.perf_counter_ns()
        self._next_ns = ended_ns + _SHARE * (ended_ns - began_ns)
        self._level_bytes, self._known_then = figures.current, self.known_bytes
        high = figures.peak if figures.peak > self._peak_bytes else figures.current
        self._peak_bytes = figures.peak
        self._highest = max(self._highest, high)
        return high


def _block_bytes(n_bytes: int, device: torch.device) -> int:
    """What a storage takes of its allocator; CUDA's rounds."""
    return up_to(n_bytes, BLOCK_BYTES) if device.type == "cuda" else n_bytes


def _levels_of(device: torch.device) -> DeviceLevels | None:
    # a backend whose allocator tells nothing: what is known stands for the level
    try:
        return DeviceLevels(device)
    except (AttributeError, RuntimeError):
        return None
