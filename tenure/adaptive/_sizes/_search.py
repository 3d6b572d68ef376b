"""The state of one call: its sizes, and what it measures. The table of docs/sizes.md says it.

Invariant: after a failure the size is strictly smaller, allowed, and a size known to work where
there is one; the state of the search is local, what it learns goes to the record of its site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index

from tenure._errors import AdaptiveUsageError
from tenure._oom import OomInfo

from .._memory import MemoryMeter, meter_for
from ._limits import NO_LIMITS, SizeLimits
from ._model import SizeModel, fitting
from ._predicted import Foresight, foreseen, with_margin
from ._record import SizeRecord
from ._remembered import RememberedCall

Reduce = Callable[[int, OomInfo], int]
"""A user's way to make a failed size smaller."""

_PIECES_OF_A_CALL = 64
"""So many pieces of work that fit count like one call, for loops that are called once."""
_MOST_TRIALS = 8
"""So many parts of the work are run to be measured, and taken back, in a call at the most."""
_FIRST_TRIAL = 8
"""The first trial has one part in so many of a size that failed and of which nothing is known."""
_N_HALVED = 3
"""So many failures in a row are answered by half where the size stays what it comes to."""
_LITTLE = 8
"""A size that worked before and fails is made smaller by one part in so many, at least."""
_KINDS_OF_BYTES = ("device", "host")
"""The kinds of errors whose number of bytes was wanted of the memory that ran out."""


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
        "_base", "_ceiling", "_free_bytes", "_grown", "_had_worked", "_has_trials", "_in_pieces",
        "_initial", "_limits", "_meter", "_model", "_n_pieces", "_n_trials", "_predict",
        "_reduce", "_remembered", "_works", "is_trial", "room", "size",
    )  # fmt: skip

    def __init__(
        self,
        initial: int,
        limits: SizeLimits,
        remembered: RememberedCall,
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
        self._had_worked = 0
        # what was free when what is tried now began; None where nobody has asked
        self._free_bytes: int | None = None
        self._n_pieces = 0
        # whether anything of this call has worked since the last failure
        self._works = True
        self._has_trials = has_trials
        # None: nothing has ever failed here
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
        if record is not None:
            self._begin(self._learn(record))

    def _learn(self, record: SizeRecord | None = None) -> SizeModel:
        """Return what chooses sizes from now on, by a record, which is kept for later calls."""
        if self._model is None:
            limits, record = self._limits, record or self._remembered.new()
            self._model = SizeModel(
                limits.floor, self._ceiling, limits.align, has_margin=True, record=record
            )
        return self._model

    def at_most(self, n_left: int) -> None:
        """Only so much is left to do: it is what is tried now."""
        self.size = n_left

    @property
    def limited_by(self) -> str:
        """The arguments that allow no smaller size than this one, as errors name them."""
        return self._limits.in_the_way_below(self.size)

    # --- a call, or a piece of one, begins

    def _begin(self, model: SizeModel) -> None:
        """Choose the first size by what is known of the site."""
        record = model.record
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
            self.size = self._again(model, known, self.size, free_bytes)
        elif self.size < self._ceiling and record.has_risen(free_bytes):
            self.size = self._start(record)
        # a size that was measured is not measured again: that would restart the user's peak
        if self.size > known.ok or self.size < self._base or not known.points:
            self._measure(meter)

    def go_on(self, room: MemoryMeter) -> None:
        """Choose the size of the next piece, by what the last one needed and what is free now.

        It fits beside results that piled up, and grows back where they went. Called when the last
        result is with its user, or gone.
        """
        model = self._model
        if model is None or self.size > model.record.ok:
            return
        known = model.record.snapshot()
        if known.points:
            ok = self._limits.aligned(min(known.ok, self._ceiling))
            self.size = self._again(model, known, ok, room.available_bytes())
            if self.size > ok:
                self._measure(room)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing says that the size fits: none as large has worked, and none has failed.

        What worked and failed in work of another shape is only a guess.
        """
        if self._model is None:
            return True
        known = self._model.record.snapshot()
        if known.is_guess:
            return not known.points
        return known.bad is None and known.ok < self.size

    def stay(self) -> None:
        """Try nothing larger than what has worked where something has failed.

        For work that can't be tried again.
        """
        known = None if self._model is None else self._model.record.snapshot()
        if known is None or self.is_unknown:
            self.size = self._base = self._ceiling
        elif known.bad is not None:
            most = min(self.size, known.ok or known.bad // 2)
            self.size = self._base = max(self._limits.floor, most)

    def remember(self) -> None:
        """Let what works be known to later calls, though nothing has failed."""
        self._learn()

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
        self._learn().record.note_predicted(high if size < high else None, device, free_bytes)
        less = max(self._limits.floor, size // 2)
        if less < size and each_bytes is not None:
            self._grown = less, int(each_bytes * (size - less))
        # the next call goes by what this one needs, and not by what was predicted
        self._measure(meter)

    def _start(self, record: SizeRecord) -> int:
        limits = self._limits
        first = limits.first(self._initial)
        start = record.start(first, self._ceiling, limits.align)
        # what is known may be of other limits
        return max(limits.aligned(start), min(first, limits.floor))

    def _again(self, model: SizeModel, known: SizeRecord, size: int, free_bytes: int) -> int:
        """Return the size instead of one that works, by what was measured and what is free now."""
        limits, ok, n_bytes = self._limits, min(known.ok, self._ceiling), known.points[-1].n_bytes
        if known.least_free_bytes is not None:
            # Free memory between tensors of before is not told, and part of the work fits there.
            # So what `ok` needs was there when it began, and only what went since is missing.
            free_bytes = max(free_bytes, n_bytes + free_bytes - known.least_free_bytes)
        fits = fitting(known.points, free_bytes)
        if fits < size <= ok:
            # memory has gone, for the state of an optimizer, results that pile up, another program
            return limits.below(size, with_margin(fits)) or size
        if limits.aligned(ok) <= size < self._ceiling:
            model.limit_bytes = free_bytes
            larger = model.next_size(is_trial=False)
            if larger is not None and larger <= self._ceiling:
                return larger
        return size

    # --- it worked

    def succeeded(self) -> int | None:
        """Work of this size returned; the size before, where none as large had worked yet."""
        model = self._model
        # by far the most: nothing has ever failed here
        if model is None:
            return None
        size, record = self.size, model.record
        meter, self._meter = self._meter, None
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
        if self._in_pieces and needed_bytes:
            # go_on() chooses, when the result is with its user or gone: only then the free memory
            # is what the next piece has
            self.room = meter
        elif self._in_pieces:
            self._climb(record)
        return before

    def tried(self) -> None:
        """Choose the size after a trial of this size, which returned and was undone."""
        model, meter, size = self._model, self._meter, self.size
        # a trial follows a failure, which makes both
        assert model is not None
        assert meter is not None
        needed_bytes = meter.needed_bytes()
        model.limit_bytes = max(meter.available_bytes(), needed_bytes or 0)
        model.ran(size, needed_bytes, self._free_bytes)
        self._works = True
        self._n_trials += 1
        larger = model.next_size() if needed_bytes and self._n_trials < _MOST_TRIALS else None
        self.is_trial = larger is not None
        self.size = self._base = larger or model.ok
        self._measure(meter)

    def finished(self) -> None:
        """Note that the call has returned."""
        if self._model is not None and not self._model.n_ooms and self._n_pieces:
            self._model.record.note_clean_call(self._base, self._ceiling)

    def _climb(self, record: SizeRecord) -> None:
        """In a loop of many pieces: count them like calls, and go up a step where that is due."""
        if self._n_pieces % _PIECES_OF_A_CALL == 0:
            record.note_clean_call(self._base, self._ceiling)
        is_ok = self.size == self._limits.aligned(record.ok)
        if is_ok and record.is_due(self._ceiling):
            self.size = self._start(record)
            if (meter := meter_for(record.device)) is not None:
                self._measure(meter)

    def _measure(self, meter: MemoryMeter) -> None:
        """Measure how much the next attempt needs."""
        self._meter = meter
        self._free_bytes = meter.available_bytes()
        meter.restart()

    # --- it failed

    def shrink(self, info: OomInfo) -> bool:
        """Work of this size ran out of memory: make it smaller; False where no size is left."""
        model, size, limits = self._learn(), self.size, self._limits
        meter = self._meter or meter_for(info.device)
        free_bytes = None if meter is None else meter.available_bytes()
        is_measured = meter is not None and meter.measures
        # the record forgets what worked where that fails
        known = model.record.snapshot()
        # it worked before, so that not much is missing
        had_room = bool(known.points) and self._works
        was_trial, self.is_trial = self.is_trial, False
        self._n_pieces, self._works, self._grown = 0, False, None
        model.ran_out(size, info.device, free_bytes)
        wanted = self._wanted(known, info, free_bytes, had_room, is_measured)
        is_blind = free_bytes is not None and not (had_room or 0 < known.ok < size)
        if is_blind and self._reduce is None:
            wanted = self._predicted(size, free_bytes) or wanted
        if known.ok >= size and not was_trial:
            # the part that was measured fits, and the whole does not: it tells nothing
            self._has_trials = False
        if is_measured and self._has_trials:
            smaller = self._tried_out(free_bytes, wanted, is_blind=is_blind)
        else:
            smaller = limits.below(size, wanted)
        if smaller is None:
            return False
        self.size = self._base = smaller
        if meter is not None:
            self._measure(meter)
            self.room = meter if self._in_pieces and is_measured else None
        return True

    def _wanted(
        self,
        known: SizeRecord,
        info: OomInfo,
        free_bytes: int | None,
        had_room: bool,
        is_measured: bool,
    ) -> int:
        """Return the size to try after one that failed, before it is made one that is allowed."""
        size, reduce, fits = self.size, self._reduce, None
        if known.points and free_bytes is not None:
            fits = fitting(known.points, free_bytes)
        if 0 < known.ok < size:
            if fits is None or reduce is not None or fits >= known.ok:
                return known.ok
            return with_margin(fits)
        if reduce is not None:
            return checked_reduced(reduce(size, info))
        if free_bytes is None:
            return size // 2
        if fits is not None and had_room:
            return min(with_margin(fits), size - -(-size // _LITTLE))
        # A quarter where the call can measure it and go on with a larger one: 64 times too much is
        # three failures. Else 1/2 1/4 1/8, then 1/32 1/128: the first run of `batch` keeps half of
        # the largest size from 8 times too much, and comes to a quarter from 60 times with five
        # failures at the most. Halving on would cost six, quartering at once would lose half of
        # what fits from 2 times too much. See
        # test_the_first_call_of_one_piece_comes_to_no_less_than_a_quarter, and the test before it.
        assert self._model is not None
        is_mended = self._in_pieces or self._has_trials
        is_halved = not is_measured or (self._model.n_ooms <= _N_HALVED and not is_mended)
        wanted = size // (2 if is_halved else 4)
        wanted_bytes = info.requested_bytes or 0
        if info.kind in _KINDS_OF_BYTES and wanted_bytes > free_bytes:
            # what is asked for at once is taken to grow with the size
            wanted = min(wanted, size * free_bytes // wanted_bytes)
        return wanted

    def gave_up(self) -> int:
        """Give up: no allowed size fits; return the largest that worked before, or 0."""
        self._learn().record.forget()
        return self._had_worked

    def _predicted(self, size: int, free_bytes: int | None) -> int | None:
        """Return the size that is predicted to fit; None where nobody is asked, or not believed."""
        # once: a size that was predicted to fit and did not says that predictions are too low
        predict, self._predict = self._predict, None
        limits = self._limits
        if predict is None or free_bytes is None or size <= limits.floor:
            return None
        if predict(size) <= free_bytes:
            return None
        found = foreseen(predict, limits.floor, limits.aligned(size), free_bytes, limits.align)
        return None if found is None else found.size

    def _tried_out(self, free_bytes: int | None, wanted: int, *, is_blind: bool) -> int | None:
        """Return the size that a trial is to show to fit, or has; None if none is left."""
        model, size = self._learn(), self.size
        model.limit_bytes = free_bytes
        if model.is_measured:
            found: int | None = model.next_size() or model.ok
        else:
            # a trial need not be large, but it has to fit: its size is not what the call comes to
            wanted = min(wanted, size // _FIRST_TRIAL) if is_blind else wanted
            found = self._limits.below(size, wanted)
        self.is_trial = found is not None and not (model.is_measured and found == model.ok)
        return found


def checked_reduced(size: object) -> int:
    """Check the size that a user's ``reduce`` returned.

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
