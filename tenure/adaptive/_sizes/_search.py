"""Which size to try next, within one call of an entry point.

Invariant: after a failure the size is strictly smaller, allowed, and a size known to work where
there is one; the state of the search is local, what it learns goes to the record of its site.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Protocol

from tenure._errors import AdaptiveUsageError

from .._attempt import AdaptiveEvent, OnRetry, tell
from .._memory import MemoryMeter, meter_for
from .._oom import OomInfo
from ._limits import NO_LIMITS, SizeLimits
from ._policy import (
    COARSE,
    Measured,
    blind,
    calling_for,
    fitting,
    is_worth_it,
    short_of,
    with_margin,
)
from ._record import SizeRecord

Reduce = Callable[[int, OomInfo], int]
"""A user's way to make a failed size smaller."""

_PIECES_OF_A_CALL = 64
"""So many pieces of work that fit count like one call, for loops that are called once."""
_RISE_BYTES = 1 << 28
"""Memory that came free has to be so much to count, where nothing tells what a size needs."""
_MANY_FAILURES = 3
"""A call that has met so many goes up carefully: no other size should fail."""
_MOST_TRIALS = 6
"""So many parts of the work are run to be measured, and taken back, in a call at the most."""
_LITTLE = 8
"""What worked before and fails is made smaller by one part in so many, at least."""
_KINDS_OF_BYTES = ("device", "host")
"""The kinds of errors whose number of bytes was wanted of the memory that ran out."""


class Remembered(Protocol):
    """Where a call finds and leaves what is known of its site."""

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
        has_trials: whether a part of the work can be run and taken back, to measure a size.

    Attributes:
        size: the size to try now.
        is_trial: whether a part of the work is to show first what the size needs; see `tried`.
        room: the memory that results of pieces may fill up; None where nothing has failed yet, or
            nothing can be measured.
    """

    __slots__ = (
        "_base", "_ceiling", "_elsewhere", "_in_pieces", "_initial",
        "_limits", "_meter", "_most_free_bytes", "_n_failures", "_n_in_a_row", "_n_pieces",
        "_n_trials", "_name", "_needed_bytes", "_on_retry", "_record", "_reduce", "_remembered",
        "_requests", "_unit", "is_trial", "room", "size",
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
        has_trials: bool = False,
    ) -> None:
        self._name = name
        self._unit = unit
        self._initial = initial
        self._limits = limits
        self._remembered = remembered
        self._reduce = reduce
        self._on_retry = on_retry
        self._in_pieces = in_pieces
        self._needed_bytes: int | None = None
        self._meter: MemoryMeter | None = None
        self.room: MemoryMeter | None = None
        self._n_failures = self._n_in_a_row = self._n_pieces = 0
        self._most_free_bytes = 0
        self._n_trials = _MOST_TRIALS if has_trials else 0
        self._requests: tuple[Measured, ...] = ()
        self.is_trial = False
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

    def go_on(self, room: MemoryMeter) -> None:
        """Choose the size of the next piece, by what the last one needed and what is free now.

        It fits beside results that piled up, and grows back where they went. Called when the last
        result is with its user, or gone.
        """
        record, meter, needed_bytes = self._record, self._meter, self._needed_bytes
        self._needed_bytes = None
        if record is not None and meter is not None and needed_bytes:
            self._leap(record, meter, needed_bytes)
        if record is None or self.size > record.ok:
            return
        known = record.snapshot()
        if not known.points:
            return
        free_bytes, ok = room.available_bytes(), self._limits.aligned(min(known.ok, self._ceiling))
        fits = fitting(known.points, free_bytes, is_steep=known.is_steep)
        if fits < ok:
            self.size = self._limits.below(ok, with_margin(fits)) or self.size
        elif larger := self._that_fits(known, ok, free_bytes):
            self.size = larger
            self._measure(room)
        else:
            self.size = ok

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
        grew = record.note_ok(size, needed_bytes)
        if grew and size != self._base:
            event = AdaptiveEvent("grow", self._name, self._unit, self._base, size)
            tell(event, self._on_retry)
            self._base = size
        self._n_pieces += 1
        self._n_in_a_row = 0
        if meter is None or not needed_bytes:
            if self._in_pieces:
                self._climb(record)
        elif self._in_pieces:
            self._needed_bytes, self.room = needed_bytes, meter
        else:
            self._leap(record, meter, needed_bytes)

    def tried(self) -> None:
        """A part of the work, of this size, returned and was taken back; choose the size by it."""
        record, meter, size = self._record, self._meter, self.size
        assert record is not None
        assert meter is not None
        self._n_trials -= 1
        needed_bytes = meter.needed_bytes()
        record.note_ok(size, needed_bytes)
        self._n_in_a_row = 0
        larger = None
        if needed_bytes:
            larger = self._that_fits(record.snapshot(), size, meter.available_bytes())
        self.is_trial = larger is not None and self._n_trials > 0
        self.size = self._base = larger or size
        self._measure(meter)

    def failed(self, info: OomInfo) -> bool:
        """Work of this size ran out of memory; the size is smaller now, or False: none is left."""
        if self._elsewhere:
            self._elsewhere = False
            return False
        record = self._record
        if record is None:
            record = self._record = self._remembered.new()
        size, meter = self.size, self._meter or meter_for(info.device)
        free_bytes = None if meter is None else meter.available_bytes()
        known = record.snapshot()
        record.note_failed(size, self._limits.align, info.device, free_bytes)
        self._n_failures += 1
        self._n_in_a_row += 1
        self._n_pieces = 0
        smaller = self._limits.below(size, self._wanted(known, info, meter, free_bytes))
        if smaller is None:
            return False
        self.size = self._base = smaller
        if meter is not None:
            self._measure(meter)
            self.room = meter if self._in_pieces and meter.measures else None
            self._prepare_trial(known, size, meter)
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
        if known.device is None or (known.bad is None and not known.points):
            return
        meter = meter_for(known.device)
        if meter is None:
            return
        free_bytes = meter.available_bytes()
        self.room = meter if self._in_pieces and meter.measures else None
        if known.points:
            self._begin_measured(known, free_bytes)
        elif self.size < self._ceiling and _has_risen(free_bytes, known.free_bytes):
            record.note_risen(free_bytes)
            self.size = self._start(record)
        if self.size > known.ok or self.size < self._base or not known.points:
            self._measure(meter)

    def _begin_measured(self, known: SizeRecord, free_bytes: int) -> None:
        """Choose the first size by what the last ones needed and what is free now."""
        ok = min(known.ok, self._ceiling)
        fits = fitting(known.points, free_bytes, is_steep=known.is_steep)
        if fits < self.size <= ok:
            # memory has gone, for the state of an optimizer or to another program
            self.size = self._limits.below(self.size, with_margin(fits)) or self.size
        elif self.size >= self._limits.aligned(ok) and self.size < self._ceiling:
            self.size = self._that_fits(known, known.ok, free_bytes) or self.size

    def _leap(self, record: SizeRecord, meter: MemoryMeter, needed_bytes: int) -> None:
        """Go on with the size that fits, by what the last one needed, or stop measuring."""
        size = self.size
        free_bytes = meter.available_bytes()
        known = record.snapshot()
        if size != known.ok:  # a short last piece, or another thread has come farther
            known.points = (Measured(size, needed_bytes),)
        larger = self._that_fits(known, size, free_bytes)
        if larger and self._in_pieces:
            self.size = larger
            self._measure(meter)
            return
        self._meter = None
        if not larger and size == known.ok and (size >= COARSE or known.is_full(free_bytes)):
            record.note_settled()

    def _that_fits(self, known: SizeRecord, size: int, free_bytes: int) -> int | None:
        """The largest size that surely fits, if it is worth a new size."""
        step = known.step(self._limits.align)
        fits = with_margin(fitting(known.points, free_bytes))
        if known.is_steep or self._n_failures >= _MANY_FAILURES:
            careful = with_margin(fitting(known.points, free_bytes, is_steep=True))
            # where there is room for two steps, one fits whatever the memory grows with
            fits = max(careful, size + step) if fits >= size + 2 * step else careful
        bad = known.fails_at(free_bytes)
        if bad is not None:
            fits = short_of(bad, size, fits, step)
        fits = min(fits // self._limits.align * self._limits.align, self._ceiling)
        return fits if is_worth_it(size, fits) else None

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

    def _wanted(
        self, known: SizeRecord, info: OomInfo, meter: MemoryMeter | None, free_bytes: int | None
    ) -> int:
        """The size to try after a failure, before it is made one that is allowed.

        Args:
            known: what was known before the failure.
            info: the error.
            meter: measures the memory that ran out.
            free_bytes: what is free of it.
        """
        size = self.size
        if known.ok < size and known.ok:
            return self._back(known, free_bytes)
        if self._reduce is not None:
            return checked_reduced(self._reduce(size, info))
        if meter is None or free_bytes is None:
            return size // 2
        if known.points and self._n_in_a_row == 1:  # it worked before, so that not much is missing
            fits = fitting(known.points, free_bytes)
            return min(with_margin(fits), size - -(-size // _LITTLE))
        is_mended = self._in_pieces or self._n_trials > 0
        wanted = size // 2
        if meter.measures:
            wanted = blind(size, self._n_failures, is_mended=is_mended)
        # what a later failure finds free may only be what has not come back yet
        self._most_free_bytes = max(self._most_free_bytes, free_bytes)
        if info.requested_bytes and info.kind in _KINDS_OF_BYTES:
            self._requests = (*self._requests[-1:], Measured(size, info.requested_bytes))
            wanted = min(wanted, calling_for(self._requests, self._most_free_bytes))
        return wanted

    def _back(self, known: SizeRecord, free_bytes: int | None) -> int:
        """The size that worked, or as much of it as fits into what is free now."""
        if not known.points or free_bytes is None or self._reduce is not None:
            return known.ok
        return min(known.ok, with_margin(fitting(known.points, free_bytes)))

    def _prepare_trial(self, known: SizeRecord, failed: int, meter: MemoryMeter) -> None:
        """Let a part of the work show what the size needs, where a size has to be found."""
        if not self._n_trials:
            return
        if known.ok >= failed and not self.is_trial:
            # the part that was measured fits, and the whole does not: it tells nothing
            self._n_trials = 0
        self.is_trial = self._n_trials > 0 and meter.measures


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


def _has_risen(free_bytes: int, then_bytes: int | None) -> bool:
    return then_bytes is not None and free_bytes - then_bytes > max(_RISE_BYTES, then_bytes // 8)
