"""Tolerances for results that count as the same, and reports of those that differ.

The one home of every tolerance of `check_split` and of the verification of `step`: by the types of
the results, and by what rounding makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tenure._show import Column, Paragraph, Part, Report, Table


class Tolerance(NamedTuple):
    """The largest relative error that passes, by the coarsest type of floating point on the way.

    Attributes:
        float64: where nothing was coarser than that.
        float32: the same.
        coarser: for half precision, and for what is none of these.
    """

    float64: float
    float32: float
    coarser: float

    def of(self, results: Iterable[Tensor], types: Iterable[torch.dtype] = ()) -> float:
        """Return the tolerance of these results; without any, the largest.

        Args:
            results: numbers that are compared.
            types: what else rounded on the way.
        """
        # around the call it counts although no result shows it
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            return self.coarser
        known = {torch.float64: self.float64, torch.float32: self.float32}
        on_the_way = {*types, *(each.dtype for each in results)}
        return max((known.get(dtype, self.coarser) for dtype in on_the_way), default=self.coarser)


# `check_split` asks nobody else: float32 gets what a deep network loses, and bfloat16, with 8 bits,
# the 5 % that its gradients are off in whole networks. The numbers stand in its docstring.
CHECKED = Tolerance(1e-9, 1e-4, 5e-2)
# What is farther off is no error yet: `is_noise` decides, by runs that cost time.
GRADIENTS = Tolerance(1e-9, 1e-4, 2e-2)
# A loss is a sum of many, without the cancellation that gradients have.
LOSSES = Tolerance(1e-9, 2e-5, 1e-2)
# Losses that were put together of two and went through a logarithm or a root.
DECLARED = Tolerance(1e-8, 2e-5, 1e-2)
# Sums of four runs that cancel; relative to the largest, in each of the four.
EXCHANGED_RTOL = 4 * 1e-4
# Elements that are compared at once.
_MOST_AT_ONCE = 1 << 14
# A gradient so much smaller than the largest one is zero but for rounding.
GRADIENT_FLOOR = 1e-3

# How much farther than one more rounding of each operation two kernels may be apart.
_ROUNDINGS = 16
_ROUGHER = 8
_LEAST_GROWTH = 2
# One number, such as a loss in float32, stays what it was in many a rough run, and in others is off
# by as much with one rounding as with many: see test_a_loss_that_is_rounded_on_the_way_is_right.
_DRAWS = 6


def is_noise(error: float, noise: Callable[[int, int], float]) -> bool:
    """Return whether a difference is one of rounding, or of what the function draws unseen.

    It is noise only where rougher rounding makes more of it. What crosses a threshold, such as
    which sample is the hardest, is as far off with one rounding as with many, and hides what a
    split changes.

    Args:
        error: how far the parts are off.
        noise: how far the whole is off from itself with so many more roundings of each operation,
            drawn the i-th time; with none of them, from a second run.
    """
    if error <= _ROUNDINGS * noise(0, 0):
        return True
    for n_draws in (1, _DRAWS):
        rough = max(noise(1, draw) for draw in range(n_draws))
        if error > _ROUNDINGS * rough:
            continue
        rougher = max(noise(_ROUGHER, draw) for draw in range(n_draws))
        if rougher >= _LEAST_GROWTH * rough:
            return True
    return False


def relative_error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference relative to the largest of ``b``; NaN if only one is.

    Args:
        a: any tensor.
        b: one of the same shape.
        floor: differences are relative to this where ``b`` has only smaller values.
    """
    if a.numel() == 0:
        return 0.0
    difference = largest = 0.0
    for x, y in zip(_slices(a), _slices(b), strict=True):
        if not torch.equal(x.isnan(), y.isnan()):
            return math.nan
        x, y = x.nan_to_num(), y.nan_to_num()
        difference = max(difference, float((x - y).abs().max()))
        largest = max(largest, float(y.abs().max()))
    return difference / (max(largest, floor) or 1.0)


def largest_value(x: Tensor) -> float:
    """Return the largest absolute value; 0 for none."""
    return max((float(each.nan_to_num().abs().max()) for each in _slices(x)), default=0.0)


def _slices(x: Tensor) -> Iterator[Tensor]:
    """Yield all elements as float64, some at a time: all at once could exceed the work itself."""
    x = x.detach()
    x = x.to_dense() if x.layout is not torch.strided else x
    x = torch.view_as_real(x) if x.is_complex() else x
    for each in x.cpu().reshape(-1).split(_MOST_AT_ONCE) if x.numel() else ():
        yield each.double()


_COLUMNS = (Column("what"), Column("rel. error", ">"), Column("which"))
DifferenceKind = Literal["module", "buffer", "loss", "term", "gradient", "random"]

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


# --- what a verification tells


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A number of the whole, and what the micro-batches make of it.

    Attributes:
        what: what the number is, such as ``"the gradient of 'net.0.weight'"``.
        whole: it, of the samples in one piece.
        split: it, of their parts.
        relative_error: how far all such numbers are apart at most.
        sizes: the samples of each part.
    """

    what: str
    whole: float
    split: float
    relative_error: float
    sizes: Sequence[int]

    def __str__(self) -> str:
        runs = [(size, len(list(group))) for size, group in groupby(self.sizes)]
        parts = " + ".join(str(size) if n == 1 else f"{n} x {size}" for size, n in runs)
        error = self.relative_error
        off = f"{100 * error:.2g} %" if error < 10 else f"{error:.2g} times its size"
        return (
            f"{self.what} for {sum(self.sizes)} samples is {self.whole:.6g} in one piece and "
            f"{self.split:.6g} as {parts} ({off} off)"
        )


def farthest(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """Return the elements of two tensors of one shape that are farthest apart; of none, zeros."""
    there: Any = a if a is not None else b
    flat = [
        (torch.zeros_like(there) if each is None else each).detach().to_dense().cpu().flatten()
        for each in (a, b)
    ]
    first, second = (torch.view_as_real(x).flatten() if x.is_complex() else x for x in flat)
    # a nan that only one of them has is as far off as can be
    gap = (first.double() - second.double()).abs().nan_to_num(nan=float("inf"))
    place = int(gap.argmax())
    return float(first[place]), float(second[place])
