"""Runs a bracket down: which size now, what it is measured by, and what is told when none fits."""

from __future__ import annotations

from tenure._oom import OomInfo

from .._memory import MemoryMeter
from ._bracket import Bracket
from ._limits import SizeLimits
from ._predicted import Predict


class SizeFinder:
    """The sizes of one search for the largest that fits; an attempt has one after the other.

    Args:
        low: the smallest size that is allowed.
        high: the largest.
        align: sizes are multiples of it.
        margin: the share of the memory, or where that can't be measured of the size, to be left.
        meter: measures what sizes need; None: nobody can.
        predict: the bytes that a size is predicted to need.

    Attributes:
        size: the size to run now.
        is_known: whether that has run, so that there is no need to run it again.
        needed_bytes: what the last size that ran to its end needed.
        limit_bytes: what it was allowed to need.
    """

    __slots__ = (
        "_align", "_bracket", "_low", "_margin", "_meter", "_ran", "is_known", "limit_bytes",
        "needed_bytes", "size",
    )  # fmt: skip

    def __init__(
        self,
        low: int,
        high: int,
        align: int = 1,
        *,
        margin: float = 0.0,
        meter: MemoryMeter | None = None,
        predict: Predict | None = None,
    ) -> None:
        limits = SizeLimits(low, high, align)
        self._low, self._align, self._margin = limits.floor, align, margin
        self._bracket = Bracket(limits.floor, limits.aligned(high), align, predict)
        self._meter = meter if meter is not None and meter.measures else None
        self._ran: set[int] = set()
        self.is_known = False
        self.needed_bytes: int | None = None
        self.limit_bytes: int | None = None
        if self._meter is not None:
            self._bracket.limit_bytes = self._limit_of(self._meter)
        self.size = self._bracket.next_size() or self._low

    @property
    def limited_by(self) -> str:
        """The arguments that allow no smaller size."""
        return "low= or align="

    @property
    def found(self) -> int:
        """The largest size that ran and leaves the margin; 0 where none does."""
        largest = self._bracket.ok
        # a limit in bytes has the margin taken off
        if not self._bracket.is_measured:
            largest = self._without_margin(largest)
        return max((size for size in self._ran if size <= largest), default=0)

    def begin(self) -> None:
        """A size begins to run: what it needs is measured from here on."""
        if self._meter is not None:
            self._meter.restart()
            self.limit_bytes = self._bracket.limit_bytes = self._limit_of(self._meter)

    def end(self) -> None:
        """It has come to its end, and what it made is still there."""
        self.needed_bytes = None if self._meter is None else self._meter.needed_bytes()

    def go_on(self) -> bool:
        """Choose the size that is to be run next; False where the search is over."""
        size = self._bracket.next_size()
        if size is None and self._bracket.ok and not self._bracket.is_measured:
            # the one that leaves the margin may not have run
            size = self._without_margin(self._bracket.ok)
        if size is None or size in self._ran:
            return False
        self.size = size
        return True

    def _without_margin(self, size: int) -> int:
        return max(self._low, int(size * (1 - self._margin)) // self._align * self._align)

    def _limit_of(self, meter: MemoryMeter) -> int:
        return int(meter.available_bytes() * (1 - self._margin))

    # --- as attempts use it

    def succeeded(self) -> None:
        """Work of this size returned."""
        if not self.is_known:
            self._ran.add(self.size)
            self._bracket.ran(self.size, self.needed_bytes)

    def shrink(self, info: OomInfo) -> bool:
        """Work of this size ran out of memory; False where no smaller one can be tried."""
        bracket = self._bracket
        bracket.ran_out(self.size)
        size = bracket.next_size()
        if size is None:
            self.is_known, size = True, bracket.ok
        self.size = size
        return size > 0

    def gave_up(self) -> int:
        """No size fits; what was found out is told, and nothing is known of before."""
        return 0
