"""Which size to try next, within one call of an entry point.

Invariant: after a failure the size is strictly smaller, allowed, and a size known to work where
there is one; the state of the search is local, what it learns goes to the record of its site.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import ClassVar, Protocol

from tenure._errors import AdaptiveUsageError

from .._memory import MemoryMeter, meter_for
from .._oom import OomInfo
from .._retry import AdaptiveEvent, OnRetry, tell
from ._limits import NO_LIMITS, SizeLimits
from ._record import SizeRecord

Reduce = Callable[[int, OomInfo], int]
"""A user's way to make a failed size smaller."""

_PIECES_OF_A_CALL = 64
"""So many pieces of work that fit count like one call, for loops that are called once."""
_MARGIN = 64
"""A size chosen by measuring is made smaller by one part in so many, for what rounding takes."""
_WORTH_IT = 100
"""A growth below one part in so many is not worth a new size."""
_COARSE = 20
"""Below this size one more counts for over 5 %: it is tried, unless it is known not to fit."""
_RISE_BYTES = 1 << 28
"""Memory that came free has to be so much to count."""
_KINDS_OF_BYTES = ("device", "host")
"""The kinds of errors whose number of bytes was wanted of the memory that ran out."""


class Remembered(Protocol):
    """Where a call finds and leaves what is known of its site.

    Attributes:
        remembers: whether another call finds what this one leaves.
    """

    remembers: ClassVar[bool]

    def known(self) -> SizeRecord | None:
        """The record of the site; None where nothing is known."""
        ...

    def new(self) -> SizeRecord:
        """The record of the site, made where there is none."""
        ...


class AdaptiveSearch:
    """The sizes of one call.

    Args:
        name: what events call the work.
        unit: what the sizes count.
        initial: the size that the user asked for.
        limits: the sizes that are allowed.
        remembered: where this call finds and leaves what is known of its site.
        reduce: the user's way to make a failed size smaller.
        on_retry: called with each growth.
        in_pieces: whether a call has many pieces, of which each may have its size.

    Attributes:
        size: the size to try now.
        room: the memory that results of pieces may fill up; None where nothing has failed yet, or
            nothing can be measured.
    """

    __slots__ = (
        "_base", "_ceiling", "_elsewhere", "_in_pieces", "_initial", "_limits", "_meter",
        "_n_failures", "_n_in_a_row", "_n_pieces", "_name", "_on_retry", "_record", "_reduce",
        "_remembered", "_unit", "room", "size",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        unit: str,
        initial: int,
        limits: SizeLimits,
        remembered: Remembered,
        reduce: Reduce | None = None,
        on_retry: OnRetry | None = None,
        *,
        in_pieces: bool = False,
    ) -> None:
        self._name = name
        self._unit = unit
        self._initial = initial
        self._limits = limits
        self._remembered = remembered
        self._reduce = reduce
        self._on_retry = on_retry
        self._in_pieces = in_pieces
        self._meter: MemoryMeter | None = None
        self.room: MemoryMeter | None = None
        self._n_failures = self._n_in_a_row = self._n_pieces = 0
        self._elsewhere = False
        if limits is NO_LIMITS:
            self._ceiling = self._base = self.size = initial
        else:
            self._ceiling = limits.ceiling(initial)
            self._base = self.size = limits.first(initial)
        record = remembered.known()
        if record is None and limits.maximum is not None:
            record = remembered.new()  # it may grow without ever having failed
        self._record = record
        if record is not None:
            self._begin(record)

    def at_most(self, n_left: int) -> None:
        """Only so much is left to do: it is what is tried now."""
        self.size = n_left

    def keep_within(self, room: MemoryMeter) -> None:
        """Let the next piece fit beside the results that piled up; grow back where they went."""
        record = self._record
        if record is None or self.size > record.ok:
            return
        fits = record.fitting(room.available_bytes())
        ok = self._limits.aligned(min(record.ok, self._ceiling))
        if fits is None:
            return
        if fits >= ok:
            self.size = ok
        elif (smaller := self._limits.below(ok, _with_margin(fits))) is not None:
            self.size = smaller

    @property
    def limited_by(self) -> str:
        """The arguments that allow no smaller size than this one, as errors name them."""
        return self._limits.in_the_way_below(self.size)

    def goes_elsewhere(self) -> int:
        """Work of the size that is returned runs on another device, and teaches nothing."""
        self._elsewhere = True
        return self.size

    def succeeded(self) -> None:
        """Work of this size returned."""
        record = self._record
        if record is None:  # by far the most: nothing has ever failed here
            return
        if self._elsewhere:
            self._elsewhere = False
            return
        size, meter = self.size, self._meter
        needed_bytes = meter.needed_bytes() if meter is not None else None
        if record.note_ok(size, needed_bytes):
            event = AdaptiveEvent("grow", self._name, self._unit, self._base, size)
            tell(event, self._on_retry)
            self._base = size
        self._n_pieces += 1
        self._n_in_a_row = 0
        if meter is not None and needed_bytes:
            self._leap(record, meter, needed_bytes)
        elif self._in_pieces:
            self._climb(record)

    def failed(self, info: OomInfo) -> bool:
        """Work of this size ran out of memory; the size is smaller now, or False: none is left."""
        if self._elsewhere:
            self._elsewhere = False
            return False
        record = self._record
        if record is None:
            record = self._record = self._remembered.new()
        size, meter = self.size, self._meter or meter_for(info.device)
        fits = None if meter is None else record.fitting(meter.available_bytes())
        record.note_failed(size, self._limits.align, info.device)
        self._n_failures += 1
        self._n_in_a_row += 1
        self._n_pieces = 0
        if meter is not None:
            record.free_bytes = meter.available_bytes()
        wanted = self._wanted(record, info, meter)
        if fits is not None and self._reduce is None:
            wanted = _with_margin(fits) if fits < size else wanted
        smaller = self._limits.below(size, wanted)
        if smaller is None:
            return False
        self.size = self._base = smaller
        if meter is not None:
            self._measure(meter)
            self.room = meter if self._in_pieces and meter.measures else None
        return True

    def finished(self) -> None:
        """The call has returned."""
        if self._record is not None and not self._n_failures and self._n_pieces:
            self._record.note_clean_call(self._base, self._ceiling)

    # --- larger

    def _begin(self, record: SizeRecord) -> None:
        """Choose the first size by what is known of the site."""
        self.size = self._start(record)
        known = record.snapshot()
        self._base = self._limits.aligned(known.ok) or self.size
        if known.bad is None or self.size >= self._ceiling:
            return
        meter = meter_for(known.device)
        if meter is None:
            return
        self.room = meter if self._in_pieces and meter.measures else None
        free_bytes = meter.available_bytes()
        if known.ok_bytes is None:
            if _has_risen(free_bytes, known.free_bytes):
                record.note_risen(free_bytes)
                self.size = self._start(record)
        elif larger := self._that_fits(known, known.ok, known.ok_bytes, free_bytes):
            self.size = larger
        if self.size > known.ok or (self.size == known.ok and known.ok_bytes is None):
            self._measure(meter)

    def _leap(self, record: SizeRecord, meter: MemoryMeter, needed_bytes: int) -> None:
        """Go on with the size that fits, by what the last one needed, or stop measuring."""
        size = self.size
        free_bytes = meter.available_bytes()
        known = record.snapshot()
        larger = self._that_fits(known, size, needed_bytes, free_bytes)
        if larger and self._in_pieces:
            self.size = larger
            self._measure(meter)
            return
        self._meter = None
        if not larger and size == known.ok and (size >= _COARSE or known.is_full(free_bytes)):
            record.note_settled()

    def _that_fits(
        self, known: SizeRecord, size: int, needed_bytes: int, free_bytes: int
    ) -> int | None:
        """The largest size that surely fits, if it is worth a new size.

        Memory that grows with the size, along a line or steeper where it is large already, grows
        at most in proportion: so what ``size`` needs in proportion is an upper bound.
        """
        fits = _with_margin(size * free_bytes // needed_bytes)
        if known.bad is not None and fits >= known.bad:
            fits = known.bad - known.step(self._limits.align)
        fits = min(fits // self._limits.align * self._limits.align, self._ceiling)
        return fits if fits - size > size // _WORTH_IT else None

    def _climb(self, record: SizeRecord) -> None:
        """In a loop of many pieces: count them like calls, and go up a step where that is due."""
        if self._n_pieces % _PIECES_OF_A_CALL == 0:
            record.note_clean_call(self._base, self._ceiling)
        if self.size == self._limits.aligned(record.ok) and record.is_due(self._ceiling):
            self.size = self._start(record)
            if (meter := meter_for(record.device)) is not None:
                self._measure(meter)

    def _measure(self, meter: MemoryMeter) -> None:
        """What is tried next tells how much it needs."""
        self._meter = meter
        meter.restart()

    def _start(self, record: SizeRecord) -> int:
        limits = self._limits
        first = limits.first(self._initial)
        start = record.start(first, self._ceiling, limits.align)
        # what is known may be of other limits
        return max(limits.aligned(start), min(first, limits.floor))

    # --- smaller

    def _wanted(self, record: SizeRecord, info: OomInfo, meter: MemoryMeter | None) -> int:
        """The size to try after a failure, before it is made one that is allowed."""
        size = self.size
        if ok := record.ok:  # something smaller is known to work
            return ok
        if self._reduce is not None:
            return checked_reduced(self._reduce(size, info))
        wanted = size // 2
        if meter is None:
            return wanted
        if meter.measures:
            wanted = size >> self._n_halvings()
        if self._n_failures == 1 and info.requested_bytes and info.kind in _KINDS_OF_BYTES:
            # once: what a second failure finds free may only be what has not come back yet
            wanted = min(wanted, size * meter.available_bytes() // info.requested_bytes)
        return wanted

    def _n_halvings(self) -> int:
        """How often to halve where a size that is too small is mended by measuring it.

        After one piece of many that is soon, so failures are worth more than small sizes; after
        one call it is later, and never where nothing is remembered.
        """
        n = self._n_in_a_row if self._in_pieces else self._n_failures
        if self._in_pieces:
            return 1 << min(n - 1, 6)
        return 4 * (n - 2) if n > 2 and self._remembered.remembers else 1


def checked_reduced(size: object) -> int:
    """What a user's ``reduce`` returned.

    Raises:
        AdaptiveUsageError: it is no whole number.
    """
    try:
        return index(size)  # type: ignore[arg-type]  # it raises TypeError, as it should
    except TypeError:
        raise AdaptiveUsageError(
            f"reduce= returned {size!r}, which is not a size. Return a whole number; one that is "
            "not smaller than the failed size, or too small, is moved into what is allowed."
        ) from None


def _with_margin(size: int) -> int:
    return size - size // _MARGIN


def _has_risen(free_bytes: int, then_bytes: int | None) -> bool:
    return then_bytes is not None and free_bytes - then_bytes > max(_RISE_BYTES, then_bytes // 8)
