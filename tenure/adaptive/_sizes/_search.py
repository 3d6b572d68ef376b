"""The state of one call: its sizes, and what it measures. The table of docs/sizes.md says it.

Invariant: after a failure the size is strictly smaller, allowed, and a size known to work where
there is one; the state of the search is local, what it learns goes to the model of its site. A
size below a failed one is a multiple of ``align``, and not below ``minimum``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index

from tenure._errors import AdaptiveUsageError
from tenure._oom import OomInfo

from .._memory import MemoryMeter, meter_for
from .._predict import Forecast
from ._model import SizeModel, SizeRange, with_margin
from ._predicted import foreseen
from ._remembered import RememberedCall

_PIECES_OF_A_CALL = 64
"""So many pieces of work that fit count like one call, for loops that are called once."""
_MOST_TRIALS = 8
"""So many parts of the work are run to be measured, and taken back, in a call at the most."""
_FIRST_TRIAL, _FIRST_PIECE, _HALF = 8, 4, 2
"""The part of a size that failed which is tried, if nothing else is known: a trial need not be
large, a piece is followed by a larger one, and other work keeps the size that it comes to."""
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
        in_pieces: whether a call has many pieces, of which each may have its size.
        has_trials: whether a part of the work can be run and taken back, to measure a size.
        n_samples: what a step runs in micro-batches of a size; 0 for other work.
        predict: the bytes that a size is predicted to need; asked after the first failure.

    Attributes:
        size: the size to try now.
        is_trial: whether a part of the work is to show first what the size needs; see `tried`.
        room: the memory that results of pieces may fill up; None where nothing has failed yet, or
            nothing can be measured.
    """

    __slots__ = (
        "_each_bytes", "_free_bytes", "_had_worked", "_has_failed", "_has_trials", "_in_pieces",
        "_initial", "_limits", "_meter", "_model", "_n_pieces", "_n_samples",
        "_n_trials", "_predict", "_remembered", "_sizes", "_works", "is_trial", "room", "size",
    )  # fmt: skip

    def __init__(
        self,
        initial: int,
        limits: SizeLimits,
        remembered: RememberedCall,
        *,
        in_pieces: bool = False,
        has_trials: bool = False,
        n_samples: int = 0,
        predict: Forecast | None = None,
    ) -> None:
        self._initial, self._limits, self._remembered = initial, limits, remembered
        self._in_pieces, self._has_trials, self._predict = in_pieces, has_trials, predict
        self._n_samples = n_samples
        # it measures what is tried now; None: nobody has to know
        self._meter: MemoryMeter | None = None
        self.room: MemoryMeter | None = None
        # what was free when what is tried now began; None where nobody has asked
        self._free_bytes: int | None = None
        self._had_worked = self._n_pieces = self._n_trials = 0
        # whether anything of this call has worked since the last failure, and has failed
        self._works, self._has_failed = True, False
        # what one more is predicted to need, until the size that was predicted has run
        self._each_bytes: float | None = None
        self.is_trial = False
        self.size = limits.first(initial)
        self._sizes = SizeRange(limits.floor, limits.ceiling(initial), limits.align)
        # None: nothing has ever failed here
        self._model = remembered.known()
        if self._model is None and limits.maximum is not None:
            # with a maximum it may grow without ever having failed: its calls have to be counted
            self._model = remembered.new()
        if self._model is not None:
            self._begin(self._learn())

    def _learn(self) -> SizeModel:
        """Return what is known of sizes, which is kept for later calls from now on."""
        if self._model is None:
            self._model = self._remembered.new()
        self._model.most_samples = max(self._model.most_samples, self._n_samples)
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
        self.size = self._start(model)
        known = model.snapshot()
        # in work of another shape it says nothing of this one
        self._had_worked = 0 if known.is_guess else known.ok
        is_measured = known.needed_bytes is not None
        meter = None if known.bad is None and not is_measured else meter_for(known.device)
        if meter is None:
            return
        self._free_bytes = free_bytes = meter.available_bytes()
        self.room = meter if self._in_pieces and meter.measures else None
        if is_measured:
            self.size = self._again(model, known, self.size, free_bytes)
        elif self.size < self._sizes.high and model.has_risen(free_bytes):
            self.size = self._start(model)
        # a size that was measured is not measured again: that would restart the user's peak
        if self.size != self._limits.aligned(known.ok) or not is_measured:
            self._measure(meter)

    def go_on(self, room: MemoryMeter) -> None:
        """Choose the size of the next piece, by what the last one needed and what is free now.

        It fits beside results that piled up, and grows back where they went. Called when the last
        result is with its user, or gone.
        """
        model = self._model
        if model is None or self.size > model.ok or model.needed_bytes is None:
            return
        known = model.snapshot()
        ok = self._limits.aligned(min(known.ok, self._sizes.high))
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
        known = self._model.snapshot()
        if known.is_guess:
            return known.needed_bytes is None
        return known.bad is None and known.ok < self.size

    def stay(self) -> None:
        """Try nothing larger than what has worked where something has failed.

        For work that can't be tried again.
        """
        known = None if self._model is None else self._model.snapshot()
        if known is None or self.is_unknown:
            self.size = self._sizes.high
        elif known.bad is not None:
            most = min(self.size, known.ok or known.bad // 2)
            self.size = max(self._limits.floor, most)

    def remember(self) -> None:
        """Let what works be known to later calls, though nothing has failed."""
        self._learn()

    def foresee(self, devices: Mapping[str, Forecast], *, share: float = 1.0) -> None:
        """Begin with the size that is predicted to fit on all devices, where one is predicted.

        Args:
            devices: their names, and the bytes that a size is predicted to need there.
            share: how much of what is free a prediction may fill.
        """
        high, limits = self.size, self._limits
        short: tuple[str, MemoryMeter, int] | None = None
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
                short, self._each_bytes = (device, meter, free_bytes), found.each_bytes
            self.size = found.size
        if short is not None:
            device, meter, free_bytes = short
            self._learn().note_predicted(high if self.size < high else None, device, free_bytes)
            # the next call goes by what this one needs, and not by what was predicted
            self._measure(meter)

    def _start(self, model: SizeModel) -> int:
        limits = self._limits
        first = limits.first(self._initial)
        start = model.start(first, self._sizes.high, limits.align)
        # what is known may be of other limits
        return max(limits.aligned(start), min(first, limits.floor))

    def _again(self, model: SizeModel, known: SizeModel, size: int, free_bytes: int) -> int:
        """Return the size instead of one that works, by what was measured and what is free now."""
        ok, n_bytes = min(known.ok, self._sizes.high), known.needed_bytes or 0
        if known.least_free_bytes is not None:
            # Free memory between tensors of before is not told, and part of the work fits there.
            # So what `ok` needs was there when it began, and only what went since is missing.
            free_bytes = max(free_bytes, n_bytes + free_bytes - known.least_free_bytes)
        fits = known.fitting(free_bytes)
        if fits is not None and fits < size <= ok:
            # memory has gone, for the state of an optimizer, results that pile up, another program
            return self._limits.below(size, with_margin(fits)) or size
        if self._limits.aligned(ok) <= size < self._sizes.high:
            return model.next_size(self._sizes, free_bytes) or size
        return size

    # --- it worked

    def succeeded(self) -> int | None:
        """Work of this size returned; the size before, where none as large had worked yet."""
        model = self._model
        # by far the most: nothing has ever failed here
        if model is None:
            return None
        size, before = self.size, model.ok
        meter, self._meter = self._meter, None
        if self._n_samples < min(model.most_samples, 2 * size):
            # Of a small batch, such as the last of an epoch, fewer than two micro-batches are as
            # large: none has gradients of another beside it, and the batch itself takes less.
            return None
        needed_bytes = meter.needed_bytes() if meter is not None else None
        grew = model.ran(size, needed_bytes, self._free_bytes)
        each_bytes, self._each_bytes = self._each_bytes, None
        less = max(self._limits.floor, size // 2)
        if each_bytes is not None and needed_bytes and less < size:
            # or all of it would pass for what a smaller size does not need
            model.ran_part(less, max(1, needed_bytes - int(each_bytes * (size - less))))
        self._n_pieces += 1
        self._works = True
        if self._in_pieces and needed_bytes:
            # go_on() chooses, when the result is with its user or gone: only then the free memory
            # is what the next piece has
            self.room = meter
        elif self._in_pieces:
            self._climb(model)
        return before if grew else None

    def tried(self) -> None:
        """Choose the size after a trial of this size, which returned and was undone."""
        model, meter, size = self._model, self._meter, self.size
        # a trial follows a failure, which makes both
        assert model is not None
        assert meter is not None
        needed_bytes = meter.needed_bytes()
        limit_bytes = max(meter.available_bytes(), needed_bytes or 0)
        told = size >= model.ok or model.ran_part(size, needed_bytes or 0)
        if size >= model.ok:
            model.ran(size, needed_bytes, self._free_bytes)
        self._works = True
        self._n_trials += 1
        larger = None
        if needed_bytes and self._n_trials < _MOST_TRIALS:
            if told:
                larger = model.with_fixed_part(self._sizes, limit_bytes)
            larger = larger or model.next_size(self._sizes, limit_bytes, is_flat=not told)
        self.is_trial = larger is not None
        self.size = larger or model.ok
        self._measure(meter)

    def finished(self) -> None:
        """Note that the call has returned."""
        if self._model is not None and not self._has_failed and self._n_pieces:
            self._model.note_clean_call(self._sizes.high)

    def _climb(self, model: SizeModel) -> None:
        """In a loop of many pieces: count them like calls, and go up a step where that is due."""
        if self._n_pieces % _PIECES_OF_A_CALL == 0:
            model.note_clean_call(self._sizes.high)
        is_ok = self.size == self._limits.aligned(model.ok)
        if is_ok and model.is_due(self._sizes.high):
            self.size = self._start(model)
            if (meter := meter_for(model.device)) is not None:
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
        # the model forgets what worked where that fails
        known = model.snapshot()
        fits = None if free_bytes is None else self._fitting(known, free_bytes)
        self._n_pieces, self._works, self._has_failed, self._each_bytes = 0, False, True, None
        model.ran_out(size, limits.align, info.device, free_bytes)
        if is_measured and self._has_trials and model.needed_bytes is not None:
            smaller: int | None = model.next_size(self._sizes, free_bytes) or model.ok
            self.is_trial = smaller != model.ok
        else:
            wanted = self._wanted(known, info, free_bytes, fits, is_measured=is_measured)
            smaller = limits.below(size, wanted)
            self.is_trial = is_measured and self._has_trials and smaller is not None
        if smaller is None:
            return False
        self.size = smaller
        if meter is not None:
            self._measure(meter)
            self.room = meter if self._in_pieces and is_measured else None
        return True

    def _fitting(self, known: SizeModel, free_bytes: int) -> int | None:
        """Return what fits instead of a size that failed, if what is known says something of it."""
        fits = known.fitting(free_bytes)
        if fits is None or known.ok < self.size:
            return fits
        # it worked before, so that not much is missing
        little = self.size - -(-self.size // _LITTLE)
        return min(with_margin(fits), little) if self._works else None

    def _wanted(
        self,
        known: SizeModel,
        info: OomInfo,
        free_bytes: int | None,
        fits: int | None,
        *,
        is_measured: bool,
    ) -> int:
        """Return the size to try after one that failed, before it is made one that is allowed."""
        size = self.size
        if 0 < known.ok < size:
            return known.ok if fits is None or fits >= known.ok else with_margin(fits)
        if fits is not None:
            return fits
        if free_bytes is None:
            return size // _HALF
        if (predicted := self._predicted(size, free_bytes)) is not None:
            return predicted
        part = _FIRST_TRIAL if self._has_trials else _FIRST_PIECE if self._in_pieces else _HALF
        wanted = size // (part if is_measured else _HALF)
        wanted_bytes = info.requested_bytes or 0
        if info.kind in _KINDS_OF_BYTES and wanted_bytes > free_bytes:
            # what is asked for at once is taken to grow with the size
            wanted = min(wanted, size * free_bytes // wanted_bytes)
        return wanted

    def gave_up(self) -> int:
        """Give up: no allowed size fits; return the largest that worked before, or 0."""
        self._learn().forget()
        return self._had_worked

    def _predicted(self, size: int, free_bytes: int) -> int | None:
        """Return the size that is predicted to fit; None where nobody is asked, or not believed."""
        # once: a size that was predicted to fit and did not says that predictions are too low
        predict, self._predict = self._predict, None
        limits = self._limits
        if predict is None or size <= limits.floor or predict(size) <= free_bytes:
            return None
        found = foreseen(predict, limits.floor, limits.aligned(size), free_bytes, limits.align)
        return None if found is None else found.size


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """The sizes that a call allows.

    Attributes:
        minimum: no smaller size is tried.
        maximum: no larger size is tried; None: none larger than the initial one.
        align: sizes are multiples of it, except an initial size that is smaller than ``align``.
    """

    minimum: int = 1
    maximum: int | None = None
    align: int = 1

    @property
    def floor(self) -> int:
        """The smallest size that may be tried."""
        return -(-self.minimum // self.align) * self.align

    def first(self, initial: int) -> int:
        """Return the size to begin with where nothing is known."""
        return self.aligned(initial if self.maximum is None else min(initial, self.maximum))

    def ceiling(self, initial: int) -> int:
        """Return the largest size that may be tried."""
        return self.aligned(initial if self.maximum is None else self.maximum)

    def below(self, failed: int, wanted: int) -> int | None:
        """Return the allowed size nearest to ``wanted`` below ``failed``, or None.

        Args:
            failed: the size that failed.
            wanted: any number, also one that is not allowed.
        """
        # a multiple below what failed, whatever was wanted: that is what makes each search end
        largest = (failed - 1) // self.align * self.align
        if largest < self.floor:
            return None
        return max(self.floor, min(largest, wanted // self.align * self.align))

    def in_the_way_below(self, failed: int) -> str:
        """Return the arguments that leave no size below one that failed, as errors name them."""
        names = ["minimum="] if failed <= self.minimum else []
        names += ["align="] if failed <= self.align else []
        return " and ".join(names) or "minimum= or align="

    def aligned(self, size: int) -> int:
        """Return the largest size in whole steps; a size below one step stays."""
        # a batch that is smaller than a step has to be run, too
        return size // self.align * self.align or size


def checked_limits(minimum: int, maximum: int | None, align: int) -> SizeLimits:
    """Return the limits that a user gave.

    Raises:
        AdaptiveUsageError: one is no whole number from 1 up, or they leave no size.
    """
    limits = SizeLimits(
        checked_size("minimum", minimum),
        None if maximum is None else checked_size("maximum", maximum),
        checked_size("align", align),
    )
    if limits.maximum is not None and limits.maximum < limits.floor:
        raise AdaptiveUsageError(
            f"maximum={maximum} leaves no size: the smallest allowed is {limits.floor}, by "
            f"minimum={minimum} and align={align}. Raise the maximum."
        )
    return limits


def checked_size(name: str, size: object) -> int:
    """Return a number of things to do at once.

    Raises:
        AdaptiveUsageError: it is no whole number from 1 up.
    """
    try:
        number = index(size)  # type: ignore[arg-type]  # it raises TypeError, as it should
    except TypeError:
        number = 0
    if number < 1 or isinstance(size, bool):
        raise AdaptiveUsageError(f"{name}={size!r} is not a size. Give a whole number from 1 up.")
    return number


def checked_initial(name: str, initial: int | None, limits: SizeLimits) -> int | None:
    """Return the size to begin with; without one the largest that is allowed, or None.

    Raises:
        AdaptiveUsageError: it is no size, or no size is allowed from the minimum up to it.
    """
    if initial is None:
        return limits.maximum
    initial = checked_size(name, initial)
    if initial < limits.minimum:
        raise AdaptiveUsageError(
            f"{name}={initial} is below minimum={limits.minimum}. Raise it, or lower the minimum."
        )
    if limits.first(initial) < limits.minimum:
        raise AdaptiveUsageError(
            f"{name}={initial} leaves no size: the smallest allowed is {limits.floor}, by "
            f"minimum={limits.minimum} and align={limits.align}. Raise it, or lower the minimum."
        )
    return initial
