"""The state of one call: its sizes, what it measures; what to try next is the policy's.

Invariant: after a failure the size is strictly smaller, allowed, and a size known to work where
there is one; the state of the search is local, what it learns goes to the record of its site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Protocol

from tenure._errors import AdaptiveUsageError
from tenure._oom import OomInfo

from .._memory import MemoryMeter, meter_for
from . import _policy as policy
from ._limits import NO_LIMITS, SizeLimits
from ._model import SizeModel
from ._policy import Failure
from ._predicted import Foresight, foreseen
from ._record import Measured, SizeRecord

Reduce = Callable[[int, OomInfo], int]
"""A user's way to make a failed size smaller."""

_PIECES_OF_A_CALL = 64
"""So many pieces of work that fit count like one call, for loops that are called once."""
_MOST_TRIALS = 8
"""So many parts of the work are run to be measured, and taken back, in a call at the most."""
_FIRST_TRIAL = 8
"""The first trial has one part in so many of a size that failed and of which nothing is known."""
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
        initial: the size that the user asked for.
        limits: the sizes that are allowed.
        remembered: where this call finds and leaves what is known of its site.
        reduce: the user's way to make a failed size smaller.
        in_pieces: whether a call has many pieces, of which each may have its size.
        has_trials: whether a part of the work can be run and taken back, to measure a size.
        predict: the bytes that a size is predicted to need; asked after the first failure.

    Attributes:
        size: the size to try now.
        is_trial: whether a part of the work is to show first what the size needs; see `tried`.
        room: the memory that results of pieces may fill up; None where nothing has failed yet, or
            nothing can be measured.
    """

    __slots__ = (
        "_base", "_ceiling", "_free_bytes", "_grown", "_had_worked", "_has_trials",
        "_in_pieces", "_initial", "_limits", "_meter", "_model", "_n_failures", "_n_pieces",
        "_n_trials", "_needed_bytes", "_predict", "_record", "_reduce", "_remembered", "_works",
        "is_trial", "room", "size",
    )  # fmt: skip

    def __init__(
        self,
        initial: int,
        limits: SizeLimits,
        remembered: Remembered,
        reduce: Reduce | None = None,
        *,
        in_pieces: bool = False,
        has_trials: bool = False,
        predict: Foresight | None = None,
    ) -> None:
        self._initial = initial
        self._limits = limits
        self._remembered = remembered
        self._reduce = reduce
        self._in_pieces = in_pieces
        # it measures what is tried now; None: nobody has to know
        self._meter: MemoryMeter | None = None
        self.room: MemoryMeter | None = None
        self._needed_bytes: int | None = None
        self._had_worked = 0
        # what was free when what is tried now began; None where nobody has asked
        self._free_bytes: int | None = None
        self._n_failures = self._n_pieces = 0
        # whether anything of this call has worked since the last failure
        self._works = True
        self._has_trials = has_trials
        self._model: SizeModel | None = None
        self._n_trials = 0
        self._predict = predict
        # a smaller size than one that was predicted, and what it is predicted to need less
        self._grown: tuple[int, int] | None = None
        self.is_trial = False
        if limits is NO_LIMITS:
            self._ceiling = self._base = self.size = initial
        else:
            self._ceiling = limits.ceiling(initial)
            self._base = self.size = limits.first(initial)
        record = remembered.known()
        if record is None and limits.maximum is not None:
            # with a maximum it may grow without ever having failed: its calls have to be counted
            record = remembered.new()
        self._record = record
        if record is not None:
            self._begin(record)

    def at_most(self, n_left: int) -> None:
        """Only so much is left to do: it is what is tried now."""
        self.size = n_left

    @property
    def limited_by(self) -> str:
        """The arguments that allow no smaller size than this one, as errors name them."""
        return self._limits.in_the_way_below(self.size)

    # --- a call, or a piece of one, begins

    def _begin(self, record: SizeRecord) -> None:
        """Choose the first size by what is known of the site."""
        self.size = self._start(record)
        known = record.snapshot()
        # in work of another shape it says nothing of this one
        self._had_worked = 0 if known.is_guess else known.ok
        self._base = self._limits.aligned(known.ok) or self.size
        if known.device is None or (known.bad is None and not known.points):
            return
        meter = meter_for(known.device)
        if meter is None:
            return
        self._free_bytes = free_bytes = meter.available_bytes()
        self.room = meter if self._in_pieces and meter.measures else None
        if known.points:
            self.size = self._again(known, self.size, free_bytes)
        elif self.size < self._ceiling and policy.has_risen(known, free_bytes):
            record.note_risen(free_bytes)
            self.size = self._start(record)
        # a size that was measured is not measured again: that would restart the user's peak
        if self.size > known.ok or self.size < self._base or not known.points:
            self._measure(meter)

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
        if known.points:
            ok = self._limits.aligned(min(known.ok, self._ceiling))
            self.size = self._again(known, ok, room.available_bytes())
            if self.size > ok:
                self._measure(room)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing says that the size fits: none as large has worked, and none has failed.

        What worked and failed in work of another shape is only a guess.
        """
        record = self._record
        if record is None:
            return True
        known = record.snapshot()
        if known.is_guess:
            return not known.points
        return known.bad is None and known.ok < self.size

    def stay(self) -> None:
        """Try nothing larger than what has worked where something has failed.

        For work that can't be tried again.
        """
        record = self._record
        known = None if record is None else record.snapshot()
        if known is None or self.is_unknown:
            self.size = self._base = self._ceiling
        elif known.bad is not None:
            most = min(self.size, known.ok or known.bad // 2)
            self.size = self._base = max(self._limits.floor, most)

    def remember(self) -> None:
        """Let what works be known to later calls, though nothing has failed."""
        if self._record is None:
            self._record = self._remembered.new()

    def foresee(self, devices: Mapping[str, Foresight], *, share: float = 1.0) -> None:
        """Begin with the size that is predicted to fit on all devices, where one is predicted.

        Args:
            devices: their names, and the bytes that a size is predicted to need there.
            share: how much of what is free a prediction may fill.
        """
        high, limits = self.size, self._limits
        short: tuple[str, MemoryMeter, int, float | None] | None = None
        for device, predict in devices.items():
            meter = meter_for(device)
            assert meter is not None
            free_bytes = meter.available_bytes()
            allowed_bytes = int(free_bytes * share)
            found = foreseen(predict, limits.floor, self.size, allowed_bytes, limits.align)
            if found is None:
                self.size = high
                return
            if short is None or found.size < self.size:
                short = device, meter, free_bytes, found.each_bytes
            self.size = found.size
        if short is not None:
            self._begin_foreseen(high, *short)

    def _begin_foreseen(
        self, high: int, device: str, meter: MemoryMeter, free_bytes: int, each_bytes: float | None
    ) -> None:
        """Begin with a size that is predicted to fit where memory is shortest."""
        size = self._base = self.size
        record = self._record
        if record is None:
            record = self._record = self._remembered.new()
        record.note_predicted(high if size < high else None, device, free_bytes)
        less = max(self._limits.floor, size // 2)
        if less < size and each_bytes is not None:
            self._grown = less, int(each_bytes * (size - less))
        # the next call goes by what this one needs, and not by what was predicted
        self._measure(meter)

    def _start(self, record: SizeRecord) -> int:
        known, limits = record.snapshot(), self._limits
        first = limits.first(self._initial)
        start = policy.start(known, first, self._ceiling, limits.align)
        if policy.climbs(known, first, self._ceiling):
            record.note_climbing()
        # what is known may be of other limits
        return max(limits.aligned(start), min(first, limits.floor))

    def _again(self, known: SizeRecord, size: int, free_bytes: int) -> int:
        return policy.again(known, size, free_bytes, self._limits, self._ceiling, self._n_failures)

    # --- it worked

    def succeeded(self) -> int | None:
        """Work of this size returned; the size before, where none as large had worked yet."""
        record = self._record
        # by far the most: nothing has ever failed here
        if record is None:
            return None
        size, meter = self.size, self._meter
        needed_bytes = meter.needed_bytes() if meter is not None else None
        if self._has_trials and size == self._initial < record.ok:
            # a small batch that is whole: in parts it would have gradients of others beside it
            needed_bytes = None
        if self._grown is not None and needed_bytes:
            # or all of it would pass for what a smaller size does not need: see
            # test_what_is_remembered_is_not_predicted_again
            less, grown_bytes = self._grown
            record.note_ok(less, max(1, needed_bytes - grown_bytes), self._free_bytes)
        self._grown = None
        grew = record.note_ok(size, needed_bytes, self._free_bytes) and size != self._base
        before = self._base if grew else None
        if grew:
            self._base = size
        self._n_pieces += 1
        self._works = True
        if meter is None or not needed_bytes:
            if self._in_pieces:
                self._climb(record)
        elif self._in_pieces:
            # go_on() chooses, when the result is with its user or gone: only then the free memory
            # is what the next piece has
            self._needed_bytes, self.room = needed_bytes, meter
        else:
            self._leap(record, meter, needed_bytes)
        return before

    def tried(self) -> None:
        """A part of the work, of this size, returned and was taken back; choose the size by it."""
        record, meter, size = self._record, self._meter, self.size
        # a trial follows a failure, which makes all three
        assert record is not None
        assert meter is not None
        assert self._model is not None
        needed_bytes = meter.needed_bytes()
        record.note_ok(size, needed_bytes, self._free_bytes)
        self._works = True
        model = self._model
        model.limit_bytes = max(meter.available_bytes(), needed_bytes or 0)
        model.ran(size, needed_bytes)
        self._n_trials += 1
        larger = model.next_size() if needed_bytes and self._n_trials < _MOST_TRIALS else None
        self.is_trial = larger is not None
        self.size = self._base = larger or model.ok
        self._measure(meter)

    def finished(self) -> None:
        """The call has returned."""
        if self._record is not None and not self._n_failures and self._n_pieces:
            self._record.note_clean_call(self._base, self._ceiling)

    def _leap(self, record: SizeRecord, meter: MemoryMeter, needed_bytes: int) -> None:
        """Go on with the size that fits, by what the last one needed, or stop measuring."""
        size = self.size
        free_bytes = meter.available_bytes()
        known = record.snapshot()
        # a short last piece, or another thread has come farther
        if size != known.ok:
            known.points = (Measured(size, needed_bytes),)
        larger = self._larger(known, free_bytes)
        if larger and self._in_pieces:
            self.size = larger
            self._measure(meter)
            return
        self._meter = None
        if not larger and size == known.ok and policy.is_largest(known, free_bytes):
            record.note_largest()

    def _climb(self, record: SizeRecord) -> None:
        """In a loop of many pieces: count them like calls, and go up a step where that is due."""
        if self._n_pieces % _PIECES_OF_A_CALL == 0:
            record.note_clean_call(self._base, self._ceiling)
        is_ok = self.size == self._limits.aligned(record.ok)
        if is_ok and policy.is_due(record, self._ceiling):
            self.size = self._start(record)
            if (meter := meter_for(record.device)) is not None:
                self._measure(meter)

    def _larger(self, known: SizeRecord, free_bytes: int) -> int | None:
        align, ceiling = self._limits.align, self._ceiling
        return policy.larger(known, self.size, free_bytes, align, ceiling, self._n_failures)

    def _measure(self, meter: MemoryMeter) -> None:
        """What is tried next tells how much it needs."""
        self._meter = meter
        self._free_bytes = meter.available_bytes()
        meter.restart()

    # --- it failed

    def shrink(self, info: OomInfo) -> bool:
        """Work of this size ran out of memory: make it smaller; False where no size is left."""
        record = self._record
        if record is None:
            record = self._record = self._remembered.new()
        meter = self._meter or meter_for(info.device)
        failure = self._note_failure(info, meter)
        # the policy asks what was known before: the record forgets what worked where that fails
        size, known = failure.size, record.snapshot()
        record.note_failed(size, self._limits.align, info.device, failure.free_bytes)
        reduce = self._reduce
        wanted = policy.smaller(
            known,
            failure,
            is_mended=self._in_pieces or self._has_trials,
            reduced=None if reduce is None else lambda size: checked_reduced(reduce(size, info)),
        )
        if reduce is None and policy.is_blind(known, failure):
            wanted = self._predicted(failure) or wanted
        smaller = self._tried_out(known, failure, wanted) or self._limits.below(size, wanted)
        if smaller is None:
            return False
        self.size = self._base = smaller
        if meter is not None:
            self._measure(meter)
            self.room = meter if self._in_pieces and meter.measures else None
        return True

    def gave_up(self) -> int:
        """Nothing that is allowed fits; the largest size that had worked before this call, or 0."""
        assert self._record is not None
        self._record.forget()
        return self._had_worked

    def _predicted(self, failure: Failure) -> int | None:
        """The size that is predicted to fit; None where nobody is asked, or not believed."""
        # once: a size that was predicted to fit and did not says that predictions are too low
        predict, self._predict = self._predict, None
        free_bytes, low = failure.free_bytes, self._limits.floor
        if predict is None or free_bytes is None or failure.size <= low:
            return None
        if predict(failure.size) <= free_bytes:
            return None
        high = self._limits.aligned(failure.size)
        found = foreseen(predict, low, high, free_bytes, self._limits.align)
        return None if found is None else found.size

    def _tried_out(self, known: SizeRecord, failure: Failure, wanted: int) -> int | None:
        """The size that a trial is to show to fit, or has; None where there are no trials."""
        was_trial, self.is_trial = self.is_trial, False
        if not self._has_trials or not failure.is_measured or failure.free_bytes is None:
            return None
        if known.ok >= failure.size and not was_trial:
            # the part that was measured fits, and the whole does not: it tells nothing
            self._has_trials = False
            return None
        limits, model = self._limits, self._model
        if model is None:
            model = SizeModel(limits.floor, failure.size, limits.align, has_margin=True)
            self._model = model
        model.limit_bytes = failure.free_bytes
        model.ran_out(failure.size)
        size = model.next_size() or model.ok if model.ok else None
        if size is None:
            # a trial need not be large, but it has to fit: its size is not what the call comes to
            if policy.is_blind(known, failure):
                wanted = min(wanted, failure.size // _FIRST_TRIAL)
            size = limits.below(failure.size, wanted)
        self.is_trial = size is not None and size != model.ok
        return size

    def _note_failure(self, info: OomInfo, meter: MemoryMeter | None) -> Failure:
        self._n_failures += 1
        self._n_pieces = 0
        self._grown = None
        is_first, self._works = self._works, False
        if meter is None:
            return Failure(self.size, self._n_failures, is_first, None)
        return Failure(
            self.size,
            self._n_failures,
            is_first,
            meter.available_bytes(),
            (info.requested_bytes or 0) if info.kind in _KINDS_OF_BYTES else 0,
            meter.measures,
        )


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
