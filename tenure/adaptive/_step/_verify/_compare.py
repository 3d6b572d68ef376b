"""Two runs compared: tolerances, what differs by more, how it is told, and which module it is.

The one home of every tolerance of `check_split` and of the verification of `step`. Values alone do
not do: a loss may be zero either way, as in the first epoch of PPO, and its gradient be off by a
third. And a few samples don't show all: a fixed number of hard examples kept of all, one sample of
many that is masked, or an outlier. So the whole batch runs forward once.

Where random numbers can't be made the same for parts, samples are exchanged in two groups that lie
mixed by position, under one random state. What is a sum over samples changes by the same for one
group whatever the other holds: f(a, b) - f(a', b) - f(a, b') + f(a', b') is zero. That holds for a
mean and a sum alike; which of them it is shows in whole and parts, whatever numbers they draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tenure._show import Column, Paragraph, Part, Report, Table
from tenure._torch.quiet import without_functions

from .._loss import ONLY
from .._split import StepOutcome
from ._runs import (
    DifferenceKind,
    MixesSamples,
    SampledRun,
    SampledStep,
    chosen_samples,
    first_that_fits,
)

# The largest relative error that passes, by the coarsest type of floating point on the way: where
# all is float64, where some is float32, and anything else.
Tolerance = tuple[float, float, float]
# Of the output of a module, float32 gets what a deep network loses, and bfloat16 5 %.
OUTPUTS: Tolerance = (1e-9, 1e-4, 5e-2)
# What is farther off is no error yet: `is_noise` decides, by runs that cost time. The numbers stand
# in the docstring of `check_split`.
GRADIENTS: Tolerance = (1e-9, 1e-4, 1e-2)
# A loss is a sum of many, without the cancellation that gradients have.
_LOSSES: Tolerance = (1e-9, 2e-5, 1e-2)
# Losses that were put together of two and went through a logarithm or a root.
DECLARED: Tolerance = (1e-8, 2e-5, 1e-2)
# Sums of four runs that cancel; relative to the largest, in each of the four.
_EXCHANGED: Tolerance = (4 * 1e-4, 4 * 1e-4, 4 * 1e-2)
# A gradient so much smaller than the largest one is zero but for rounding.
_GRADIENT_FLOOR = 1e-3
# Elements that are compared at once: all could exceed the work itself.
_MOST_AT_ONCE = 1 << 14
# How much farther than one more rounding of each operation two kernels may be apart: they add up in
# another order. In half precision they add up in float32 and round once, and all gradients together
# are 0.6 apart at most, where single ones are 1.5: 16 would hide a mean over something else.
_ROUNDINGS, _ROUNDINGS_OF_HALVES = 16, 1.5
_ALL = "all gradients"
_ROUGHER = 8
_LEAST_GROWTH = 2
# One number, such as a loss in float32, stays what it was in many a rough run, and in others is off
# by as much with one rounding as with many.
_DRAWS = 6
MOST_SAMPLES = 8
# random states under which samples are exchanged, with five runs for each: a mixup by
# Beta(0.2, 0.2), which is nearly 0 or 1 half of the time, is no mixup then
_N_STATES = 8


_COLUMNS = (Column("what"), Column("rel. error", ">"), Column("which"))

_ADVICE = {
    "module": "the module mixes the samples of its batch: freeze it, replace it, or keep the batch "
    "whole",
    "buffer": "a module keeps track of its batches, and sees several smaller ones: freeze it, "
    'replace it, or accept that with batchnorm="per_chunk"',
    "loss": "no module differs, so the loss itself mixes samples, or its weight is wrong: see "
    "weight=, pass a loss on outputs as loss=, and a penalty on parameters as once=",
    "random": "no two runs agree, or Python or NumPy draws random numbers for each sample: check "
    "it with those turned off",
}


@dataclass(frozen=True, slots=True)
class SplitDifference:
    """One thing that a split changes.

    Attributes:
        kind: ``"module"``: the first module whose output for a sample depends on other samples;
            ``"buffer"``; ``"loss"`` or one ``"term"`` of it; ``"gradient"`` of a parameter or of a
            tensor of the batch; ``"random"``: two runs on the whole batch differ already, or the
            function draws numbers that can't be the same for parts.
        name: which one, such as ``"net.1 (BatchNorm1d)"``.
        relative_error: the largest difference divided by the largest value.
    """

    kind: DifferenceKind
    name: str
    relative_error: float

    def __str__(self) -> str:
        return f"{self.kind:<8}  {self.relative_error:10.1e}  {self.name}"


@dataclass(frozen=True, slots=True)
class SplitReport(Report):
    """A comparison of a step with the same in micro-batches; true if both give the same result.

    Attributes:
        sizes: the samples in each micro-batch of the split run, in order.
        rtol: the largest relative error that passes.
        differences: what is off by more, the causes first.
        advice: what to declare, where that was tried out and makes it right; else None.
    """

    sizes: tuple[int, ...]
    rtol: float
    differences: tuple[SplitDifference, ...]
    advice: str | None = None

    _figures: ClassVar = ("ok",)

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def _parts(self) -> list[Part]:
        how = f"{sum(self.sizes)} samples as {' + '.join(map(str, self.sizes))}"
        if self.ok:
            same = "the same loss, gradients and buffers as in one piece."
            return [Paragraph("", f"{how}: {same}")]
        # in their order: the causes first
        rows = [(each.kind, f"{each.relative_error:.1e}", each.name) for each in self.differences]
        table = Table(f"{how}: not the same as in one piece.", _COLUMNS, rows, rule="")
        meaning = self.advice
        if meaning is None:
            kinds = dict.fromkeys(difference.kind for difference in self.differences)
            cause = next((kind for kind in kinds if kind in _ADVICE), None)
            meaning = f"{_ADVICE[cause]}." if cause else None
        return [table, *([] if meaning is None else [Paragraph("", f"That means: {meaning}")])]


def rtol_of(
    tolerance: Tolerance, results: Iterable[Tensor], types: Iterable[torch.dtype] = ()
) -> float:
    """Return the tolerance of these results; without any, the largest.

    Args:
        tolerance: by type.
        results: numbers that are compared.
        types: what else rounded on the way.
    """
    known = {torch.float64: 0, torch.float32: 1}
    on_the_way = {*types, *[each.dtype for each in results]}
    # around the call autocast counts although no result shows it
    if not on_the_way or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return tolerance[2]
    return tolerance[max([known.get(dtype, 2) for dtype in on_the_way])]


def _flat(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.to_dense() if x.layout is not torch.strided else x
    return (torch.view_as_real(x) if x.is_complex() else x).cpu().reshape(-1)


def relative_error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference relative to the largest of ``b``; NaN if only one is.

    Args:
        a: any tensor.
        b: one of the same shape.
        floor: differences are relative to this where ``b`` has only smaller values.
    """
    difference = largest = 0.0
    for x, y in zip(_flat(a).split(_MOST_AT_ONCE), _flat(b).split(_MOST_AT_ONCE), strict=True):
        if not x.numel():
            continue
        if not torch.equal(x.isnan(), y.isnan()):
            return math.nan
        x, y = x.double().nan_to_num(), y.double().nan_to_num()
        difference = max(difference, float((x - y).abs().max()))
        largest = max(largest, float(y.abs().max()))
    return difference / (max(largest, floor) or 1.0)


def differences(
    step: SampledStep, whole: SampledRun, other: SampledRun, rtol: float, scale: float = 0.0
) -> list[SplitDifference]:
    """Return the differences above ``rtol``: buffers, the loss and its terms, gradients.

    Args:
        step: knows leaves without a name. One that only one run has was made by the function
            itself, and nobody sees its gradient.
        whole: a run.
        other: another one.
        rtol: what may be off.
        scale: a loss or term that is much smaller counts as nothing.
    """
    gradients = [each for (kind, _), each in whole.numbers.items() if kind == "gradient"]
    # such as that of a bias before a normalization, which is rounding alone
    flat = [x for x in map(_flat, gradients) if x.numel()]
    largest = max([float(x.abs().max().nan_to_num()) for x in flat], default=0.0)
    floors = {"buffer": 0.0, "gradient": _GRADIENT_FLOOR * largest}
    unnamed = {name for _, name in step.unnamed.values()}
    found: list[SplitDifference] = []
    for key in dict.fromkeys([*whole.numbers, *other.numbers]):
        a, b = whole.numbers.get(key), other.numbers.get(key)
        if a is not None and b is not None and a.shape == b.shape:
            error = relative_error(b, a, floors.get(key[0], scale))
        else:
            there = b if a is None else a
            is_nothing = there is not None and not bool(there.count_nonzero())
            # a gradient that is not there counts as zeros
            if (a is None or b is None) and (is_nothing or key[1] in unnamed):
                continue
            error = math.inf
        if not error <= rtol:
            found.append(SplitDifference(*key, error))
    return found


def _distance(run: SampledRun, whole: SampledRun) -> float:
    """Return how far apart all gradients of two runs are, relative to those of the whole."""
    apart = length = 0.0
    for key, gradient in whole.numbers.items():
        other = run.numbers.get(key)
        if key[0] == "gradient" and other is not None and other.shape == gradient.shape:
            parts = (_flat(each).split(_MOST_AT_ONCE) for each in (other, gradient))
            for x, y in zip(*parts, strict=True):
                x, y = x.double().nan_to_num(), y.double().nan_to_num()
                apart += float((x - y).square().sum())
                length += float(y.square().sum())
    return math.sqrt(apart / (length or 1.0))


def first_module(whole: SampledRun, split: SampledRun, rtol: float) -> list[SplitDifference]:
    """Return the first module whose outputs for the chunks are not those for the whole, if any.

    One that gets what differs already is innocent, because something before it mixes samples.
    """
    n_calls, lengths = len(whole.calls), split.outcome.sizes
    # two passes call everything twice; the last calls have graphs
    chunks = [split.calls[i : i + n_calls] for i in range(0, len(split.calls), n_calls or 1)]
    chunks = chunks[-len(lengths) :]
    # control flow by data: calls can't be told to belong together
    if any(len(chunk) != n_calls for chunk in chunks):
        return []
    for call, *parts in zip(whole.calls, *chunks, strict=True):
        error = _error_of_rows([part.output for part in parts], call.output, lengths)
        # a loss, or a table of all positions, is nothing for samples
        if error is None or error <= rtol:
            continue
        given = [part.given for part in parts if part.given is not None]
        # nothing, or what all samples share
        if call.given is not None and any(part.shape != call.given.shape for part in given):
            before = _error_of_rows(given, call.given, lengths)
            # the experts of a mixture get as many rows as a router sends them
            if before is None or not before <= rtol:
                continue
        return [SplitDifference("module", call.name, error)]
    return []


def _error_of_rows(parts: Sequence[Tensor], whole: Tensor, lengths: Sequence[int]) -> float | None:
    """Return how far off the rows of parts are; None if there are not as many for each sample.

    Attention folds heads into the first dimension, and so do patches.
    """
    n_rows, is_odd = divmod(len(whole) if whole.dim() else 0, sum(lengths))
    shapes = [(n_rows * length, *whole.shape[1:]) for length in lengths]
    if is_odd or not n_rows or [tuple(part.shape) for part in parts] != shapes:
        return None
    return relative_error(torch.cat([*parts]), whole)


class Mismatch(NamedTuple):
    """A number of the whole, and what the micro-batches make of it, with the text that tells it."""

    text: str
    whole: float
    split: float
    error: float


def mismatch(what: str, whole: float, split: float, error: float, sizes: Sequence[int]) -> Mismatch:
    """Tell of a difference.

    Args:
        what: what the number is, such as ``"the gradient of 'net.0.weight'"``.
        whole: it, of the samples in one piece.
        split: it, of their parts.
        error: how far all such numbers are apart at most.
        sizes: the samples of each part.
    """
    runs = [(size, len(list(group))) for size, group in groupby(sizes)]
    parts = " + ".join(str(size) if n == 1 else f"{n} x {size}" for size, n in runs)
    percent = f"{100 * error:.2g}" if error < 0.1 else f"{100 * error:.0f}"
    off = f"{percent} %" if error < 10 else f"{error:.2g} times its size"
    # as many digits as tell them apart
    told = ((f"{whole:.{n}g}", f"{split:.{n}g}") for n in (6, 10, 17))
    one, other = next((each for each in told if each[0] != each[1]), ("as much",) * 2)
    return Mismatch(
        f"{what} for {sum(sizes)} samples is {one} in one piece and {other} as {parts} ({off} off)",
        whole,
        split,
        error,
    )


def told_of(name: str) -> str:
    """Return what a term is called in errors."""
    return "the loss" if name == ONLY else f"the term {name!r}"


def _worst(found: Iterable[SplitDifference], whole: SampledRun, split: SampledRun) -> Mismatch:
    """Return the worst difference: of the loss, a term, or the gradient farthest off."""
    # users know their loss; a gradient is named only where the loss hides the difference
    first = max(found, key=lambda each: (each.kind in ("loss", "term"), each.relative_error))
    one, two = (run.numbers.get((first.kind, first.name)) for run in (whole, split))
    there = one if one is not None else two
    assert there is not None
    a, b = (_flat(torch.zeros_like(there) if x is None else x).double() for x in (one, two))
    # a nan that only one of them has is as far off as can be
    place = int((a - b).abs().nan_to_num(nan=math.inf).argmax())
    what = f"the gradient of {first.name!r}" if first.kind == "gradient" else told_of(first.name)
    error, sizes = first.relative_error, split.outcome.sizes
    return mismatch(what, float(a[place]), float(b[place]), error, sizes)


class Comparison:
    """Compares parts of a step with the whole.

    Args:
        step: the step.

    Attributes:
        step: it.
        mismatch: what differs.
        is_coupled: whether modules mix samples, as was allowed, and can't be kept from it.
        hands_on: whether parts give other results if they see what the one before has written.
        remembers: whether the whole differs from itself when it runs again.
        kept: the attributes of modules that parts leave with other values than the whole does.
    """

    def __init__(self, step: SampledStep) -> None:
        self.step = step
        self.mismatch: Mismatch | None = None
        self.is_coupled = self.hands_on = self.remembers = False
        self.kept: set[str] = set()
        # the loss of a few samples; what is much smaller counts as nothing
        self._scale = 0.0

    def samples(self) -> bool:
        """Compare gradients of a few samples; return whether that could be done."""
        step, n = self.step, min(MOST_SAMPLES, self.step.n_samples)
        # fewer where memory is short; one sample alone has no parts
        numbers = [number for number in (n, n // 2, n // 4) if number > 1]

        def chosen(n: int) -> bool:
            sizes = dict.fromkeys((min(-(-n * 5 // 8), n - 1), max(n - 2, 1)))
            spreads = step.spec.loss == "sum"
            for commonest in (False, True) if spreads and n < 4 else (False,):
                indices = chosen_samples(
                    step.tree, step.n_samples, n, spreads=spreads, commonest=commonest
                )
                self._compare_parts(indices, sizes)
                if self.mismatch is not None:
                    break
            return True

        # picked samples stand at other places, which a function of pairs does not survive: the
        # first ones may be pairs, or as many of each kind
        return bool(
            first_that_fits(chosen, numbers)
            or self.mismatch is not None
            or first_that_fits(
                lambda n: self._compare_parts([*range(n - n % 2)], [n // 2]), numbers
            )
        )

    def own_loss(self) -> bool:
        """Compare the user's loss of outputs, which may read what the function keeps elsewhere.

        Returns:
            Whether that could be done: a loss that remembers outside of modules gives other results
            each time.
        """
        step, spec = self.step, self.step.spec
        step.take_own_loss()
        self.samples()
        if not self.remembers:
            return True
        step.forget()
        step.spec, self.mismatch, self.remembers = spec, None, False
        return False

    def _forget_rounding(self) -> None:
        """Forget a difference if it may be rounding, and memory ran out as that was asked."""
        # a larger one stays: samples that happen to agree do not explain it
        if self.mismatch is not None and self.mismatch.error <= _LOSSES[2]:
            self.mismatch = None

    def _compare_parts(self, indices: list[int], sizes: Iterable[int]) -> bool:
        self._forget_rounding()
        step, n = self.step, len(indices)
        try:
            whole = step.observe(indices, n, looks=True)
            for size in sizes:
                split = step.observe(indices, size)
                # of a function that tells more than its loss, such as what a trainer logs
                if on_compared := getattr(step.spec.fn, "on_compared", None):
                    on_compared(whole.outcome, split.outcome)
                    self._compare_kept(whole, split)
                self._scale = 0.0
                again = functools.partial(step.observe, indices, n)
                if not self.agree(whole, split, GRADIENTS, again):
                    break
                with without_functions():
                    self._scale = float(whole.outcome.loss.detach().abs().nan_to_num())
        except MixesSamples:
            # statistics of each micro-batch were asked for: a difference is what the user wants
            self.is_coupled = True
            self._compare_handed_on(indices, next(iter(sizes)))
        return True

    def _compare_handed_on(self, indices: list[int], size: int) -> None:
        """Compare parts that see what other parts have written with parts that don't."""
        step = self.step
        if step.has_others:
            return
        handed_on, apart = (
            step.observe(indices, size, looks=True, apart=each) for each in (False, True)
        )
        again = functools.partial(step.observe, indices, size, apart=True)
        self.hands_on |= not self.agree(apart, handed_on, GRADIENTS, again) and not self.remembers
        self.mismatch = None

    def _compare_kept(self, whole: SampledRun, split: SampledRun) -> None:
        rtol = rtol_of(GRADIENTS, whole.rounded(), self.step.types)
        for name in whole.kept.keys() & split.kept.keys():
            one, other = whole.kept[name], split.kept[name]
            if one.shape != other.shape or not relative_error(other, one) <= rtol:
                self.kept.add(name)

    def losses(self, outcome: StepOutcome, most: int) -> bool:
        """Compare the loss of the whole batch; return whether that could be done.

        Args:
            outcome: what its micro-batches gave.
            most: how many samples may be run.
        """
        n, size = self.step.n_samples, max(outcome.sizes)
        # halves of the batch where the whole does not fit, down to one more than a micro-batch
        numbers = [n]
        while (n := max(n // 2, size + 1)) < numbers[-1]:
            numbers.append(n)
        fitting = [number for number in numbers if number <= most]

        def compared(n: int) -> bool:
            # part after part, because those of one may count alike; the last one may overlap
            for start in (*range(0, most - n, n), most - n):
                part = None if n == self.step.n_samples else range(start, start + n)
                if not self._compare_losses(outcome, part):
                    break
            return True

        return bool(first_that_fits(compared, fitting) or self.mismatch is not None)

    def _compare_losses(self, outcome: StepOutcome, indices: range | None) -> bool:
        self._forget_rounding()
        step = self.step
        n = step.n_samples if indices is None else len(indices)
        again = functools.partial(step.observe, indices, n, learns=False)
        whole, split = again(), SampledRun.of(outcome)
        # nothing needs to run again where the same samples gave the same numbers; outputs are added
        # up by another loss here, and once() is no part of what is compared
        is_other = callable(step.spec.loss) or step.spec.once is not None or indices is not None
        if step.is_random or is_other or step.without_statistics:
            split = step.observe(indices, max(outcome.sizes), learns=False)
        return self.agree(whole, split, _LOSSES, again)

    def agree(
        self,
        whole: SampledRun,
        split: SampledRun,
        tolerance: Tolerance,
        again: Callable[..., SampledRun],
    ) -> bool:
        """Return whether nothing differs but by rounding, or by unseen random numbers.

        Rougher rounding makes more of rounding. What crosses a threshold, such as which sample is
        the hardest, is as far off with one rounding as with many, and hides what a split changes.

        Args:
            whole: a run.
            split: the same in parts.
            tolerance: what needs no explanation.
            again: runs the whole again.
        """
        step, scale = self.step, self._scale

        @functools.cache
        def noise(roughness: int, draw: int) -> dict[str, float]:
            run = again(roughness=(roughness, draw))
            found = {d.name: d.relative_error for d in differences(step, whole, run, 0.0, scale)}
            return found | {_ALL: _distance(run, whole)}

        # of all gradients, and so one number for each of them that differs
        apart = functools.cache(functools.partial(_distance, split, whole))

        def is_noise(each: SplitDifference) -> bool:
            name, error = each.name, each.relative_error
            anew = noise(0, 0).get(name, 0.0)
            # A function that counts its calls, for one; kernels that add up in any order round.
            # Into the whole batch, which is no copy, it may have written.
            is_copy = tolerance is GRADIENTS
            if anew > _ROUNDINGS * rtol and is_copy and not step.has_unknown:
                self.remembers = True
                return False
            if error <= _ROUNDINGS * anew:
                return True
            most, rough, rougher = float(_ROUNDINGS), 0.0, 0.0
            if is_copy and each.kind == "gradient" and rtol == tolerance[2]:
                most, name, error = _ROUNDINGS_OF_HALVES, _ALL, apart()
            for draw in range(_DRAWS):
                rough = max(rough, noise(1, draw).get(name, 0.0))
                if error <= most * rough:
                    rougher = max(
                        rougher, *(noise(_ROUGHER, i).get(name, 0.0) for i in range(draw + 1))
                    )
                    if rougher >= _LEAST_GROWTH * rough:
                        return True
            return False

        with without_functions():
            rtol = rtol_of(tolerance, whole.rounded(), step.types)
            found = differences(step, whole, split, rtol, scale)
        if found:
            # it stays a mismatch although the runs that explain it fail
            self.mismatch = _worst(found, whole, split)
            if all(map(is_noise, found)):
                self.mismatch = None
        return self.mismatch is None


def exchanged(step: SampledStep) -> tuple[bool, Mismatch | None]:
    """Exchange samples; return whether that could be done, and what is no sum over samples."""
    # each run starts from one random state, also if the last one drew nothing
    step.is_random = True
    n = min(MOST_SAMPLES, step.n_samples)
    sizes = [size for size in (n, n // 2) if size > 1]
    found = first_that_fits(lambda size: [_exchange(step, size)], sizes)
    return (False, None) if found is None else (True, found[0])


def _exchange(step: SampledStep, n: int) -> Mismatch | None:
    """Exchange under a few random states: in one of them samples may mix by next to nothing.

    And other samples under each: those of one choice may all count alike.
    """
    here = chosen_samples(step.tree, step.n_samples, n, spreads=True)
    order = [*here, *(i for i in range(step.n_samples) if i not in here)]
    shuffled = torch.Generator().manual_seed(0)
    start, size = step.parts_of(here).state.random_now(), max(1, n // 4)
    # of each term, in one piece and in parts
    told: dict[str, list[tuple[Tensor, Tensor]]] = {}
    try:
        for _ in range(_N_STATES):
            here, there = order[:n], order[n : 2 * n]
            if len(there) < n:
                # a small batch is exchanged with itself, in another order
                there = [*here[n // 2 :], *here[: n // 2]]
            split = step.observe(here, size, learns=False).outcome.terms
            runs = [
                step.observe([(first if i % 2 else second)[i] for i in range(n)], n, learns=False)
                for first, second in ((here, here), (here, there), (there, here), (there, there))
            ]
            for name, whole in runs[0].outcome.terms.items():
                told.setdefault(name, []).append((whole.abs(), split[name].abs()))
            values = [_sums(run, step, n) for run in runs]
            rtol = rtol_of(_EXCHANGED, runs[0].rounded(), step.types)
            # go on with the numbers that come after those of a run
            step.drawn.undo()
            order = torch.randperm(len(order), generator=shuffled).tolist()
            for name in values[0]:
                a, b, c, d = (each[name] for each in values)
                error = abs(a - b - c + d) / (max(map(abs, (a, b, c, d))) or 1.0)
                if error > rtol:
                    what = (
                        f"{told_of(name)}, summed up with half of its samples exchanged for others,"
                    )
                    return mismatch(what, d, b + c - a, error, (n // 2, n - n // 2))
        most = math.sqrt(n / size)
        for name, found in told.items():
            if all(a > most * b for a, b in found) or all(b > most * a for a, b in found):
                one, parts = map(float, found[0])
                error = abs(one - parts) / max(one, parts)
                return mismatch(told_of(name), one, parts, error, (size,) * (n // size))
        return None
    finally:
        start.undo()


def _sums(run: SampledRun, step: SampledStep, n: int) -> dict[str, float]:
    """Return what adds up over samples if it is declared rightly."""
    found: dict[str, float] = {}
    is_sum = step.spec.loss != "mean"
    for name, value in run.outcome.terms.items():
        factor = 1.0 if is_sum else run.counts.get(name, run.counts.get(None, n))
        found[name] = float(value.detach().double().nan_to_num()) * factor
        if name in run.counts:
            found[f"{name}: count"] = run.counts[name]
    return found
