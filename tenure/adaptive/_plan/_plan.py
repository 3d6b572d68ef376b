"""The largest micro-batch of a step that fits, found by running the step on tensors without data.

Invariant: a plan's size was evaluated, and so was one sample more, which does not fit. Of many
micro-batches some are left out, and what these leave behind is counted in proportion.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._errors import AdaptiveUsageError, OutOfRetriesError
from tenure._show import steps
from tenure._storages import total_bytes
from tenure._text import counted, format_bytes, listed, parse_bytes, parse_share
from tenure._torch.compiler import never_compiled
from tenure._torch.fakes import is_fake

from .._advice import WITH_INNER
from .._memory import meter_for
from .._predict import PeakReport, Work, predict_peak
from .._sizes import checked_size, largest_predicted
from .._step import (
    BatchNormPolicy,
    Reduction,
    SampleDims,
    SizedStep,
    StepOutcome,
    StepSpec,
)
from ._report import Plan, by_category

Batch = TypeVar("Batch")
_MARGIN = 0.05


@never_compiled
def plan(
    fn: Callable[[Batch], Any],
    batch: Batch,
    budget: int | str,
    *,
    margin: float = _MARGIN,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    loss: Reduction | Callable[[Any], Tensor] = "mean",
    weight: Callable[[Batch], object] | None = None,
    then: Callable[..., Tensor] | None = None,
    once: Callable[[], Tensor] | None = None,
    model: nn.Module | Iterable[nn.Module] | None = None,
    batchnorm: BatchNormPolicy = "refuse",
    in_dims: SampleDims = 0,
    out_dims: SampleDims = 0,
    minimum: int = 1,
    maximum: int | None = None,
) -> Plan:
    """Find the largest micro-batch with which ``step(fn, batch)`` fits, without running it.

    The step runs on tensors without data, about as often as the batch can be halved, so a batch on
    ``meta`` may be larger than memory. The whole batch and the gradients of earlier micro-batches
    count. The verification of a split does not count, because a step skips it if memory is short.

    Args:
        fn: as of `step`.
        batch: as of `step`; its tensors are of any device, ``meta`` included.
        budget: all memory, also for the weights and the batch: bytes, or like ``"24GiB"``; or
            ``"80%"`` of the memory that is free now, in addition to the memory in use. On an
            accelerator the bytes that its allocator reserves and the allowance for kernels must
            fit.
        margin: the share of the budget that stays free, from 0 (none) to below 1. Memory varies
            from run to run, for example by fragmentation.
        optimizer: its first step counts too, with the state that it creates.
        device: the device whose memory counts; None: the device of the weights.
        loss: as of `step`.
        weight: as of `step`.
        then: as of `step`.
        once: as of `step`.
        model: as of `step`.
        batchnorm: as of `step`.
        in_dims: as of `step`.
        out_dims: as of `step`.
        minimum: the fewest samples in a micro-batch.
        maximum: the most samples in a micro-batch.

    Returns:
        The largest micro-batch that fits, and the memory that it needs.

    Raises:
        OutOfRetriesError: no micro-batch fits; the error has the memory of the smallest one.
        BatchCoupledError: the batch must be split, and a module mixes its samples.
        PredictionError: the memory of the work cannot be predicted.
        AdaptiveUsageError: an argument can't be used.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import plan
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        >>> batch = torch.empty(1000, 64, device="meta")
        >>> found = plan(lambda x: model(x).square().mean(), batch, "400KiB", margin=0)
        >>> found.micro_batch, len(found.sizes)
        (149, 7)
    """
    spec = StepSpec(
        entry="plan", fn=fn, batch=batch, loss=loss, weight=weight, then=then, once=once,
        model=model, batchnorm=batchnorm, scaler=None, in_dims=in_dims, out_dims=out_dims,
    )  # fmt: skip
    spec.check()
    evaluation = _Evaluation(spec, optimizer, device)
    n_samples = max(evaluation.n_samples, 1)
    fewest = min(checked_size("minimum", minimum), n_samples)
    most = n_samples if maximum is None else min(n_samples, checked_size("maximum", maximum))
    if most < fewest:
        raise AdaptiveUsageError(
            f"plan() got maximum={maximum}, below minimum={minimum}. Raise it."
        )
    allowed = _allowed_bytes(budget, margin, evaluation)
    with steps("plan") as show:

        def bytes_at(size: int, is_long: bool = False) -> int:
            show(f"micro-batch {size}")
            report, _ = evaluation.report(size, is_long=is_long)
            # an allocator that gives back what it caches may have room for more than the budget
            return min(report.needed_bytes, allowed if report.fits(allowed) else sys.maxsize)

        found = largest_predicted(bytes_at, fewest, most, allowed, is_exact=True)
        # what a long step piles up is seen when more of it runs
        long_bytes_at = functools.partial(bytes_at, is_long=True)
        while fewest < found and long_bytes_at(found) > allowed:
            found = largest_predicted(long_bytes_at, fewest, found - 1, allowed, is_exact=True)
        if bytes_at(found) > allowed or long_bytes_at(found) > allowed:
            raise _too_large(evaluation, allowed)
    report, sizes = evaluation.report(found)
    return Plan(
        micro_batch=found,
        n_samples=sum(sizes),
        sizes=sizes,
        peak_bytes=report.peak_bytes,
        needed_bytes=report.needed_bytes,
        budget_bytes=allowed,
        baseline_bytes=report.baseline_bytes,
        categories=report.categories,
        device=report.device,
        approximate=report.approximate,
        reasons=report.reasons,
        _adviser=report._adviser,
    )


class _Sizes:
    """The sizes that a predicted step ran; a list would be as before when the prediction ends."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: tuple[int, ...] = ()

    def note(self, outcome: StepOutcome) -> None:
        self.parts = outcome.sizes


class _Evaluation:
    """Predicts a step on tensors without data, each size once.

    Args:
        spec: the step.
        optimizer: steps after it, or None.
        device: the device whose memory counts; None: that of the weights.

    Attributes:
        work: the step with micro-batches of one sample.
        known: the reports and the samples of each micro-batch, by size and how many samples ran.
    """

    def __init__(
        self, spec: StepSpec, optimizer: Optimizer | None, device: torch.device | str | None
    ) -> None:
        self.spec = spec
        self._optimizer, self._device = optimizer, device
        self._step = SizedStep(spec)
        self.n_samples = self._step.n_samples
        run = self._step_of(1, _Sizes(), self.n_samples)
        self.work = Work(run, (spec.batch,), {}, optimizer, device)
        self.known: dict[tuple[int, int], tuple[PeakReport, tuple[int, ...]]] = {}

    def report(self, size: int, *, is_long: bool = True) -> tuple[PeakReport, tuple[int, ...]]:
        """Return the peak of a size, and the samples of each micro-batch."""
        length = self._step.length(size, is_long=is_long)
        key = size, length
        if key not in self.known:
            sizes = _Sizes()
            run, batch = self._step_of(size, sizes, length), self.spec.batch
            report = predict_peak(run, batch, optimizer=self._optimizer, device=self._device)
            left_out = (size,) * ((self.n_samples - length) // size)
            self.known[key] = report, (*left_out, *sizes.parts)
        return self.known[key]

    def _step_of(self, size: int, sizes: _Sizes, length: int, around: Any = None) -> Any:
        """Return a function of the batch that runs the step on the first of its samples.

        Args:
            size: the samples of a micro-batch.
            sizes: gets the samples of each.
            length: how many samples are run.
            around: makes the function that runs instead of the step's own.
        """
        fn = None if around is None else around(self.spec.fn)
        run = self._step.at(size, length, fn=fn, done=sizes.note)
        setattr(run, WITH_INNER, functools.partial(self._step_of, size, sizes, length))
        return run


def _allowed_bytes(budget: int | str, margin: float, evaluation: _Evaluation) -> int:
    """Return the bytes that may be alive at the peak: a share is of what is free, beside the work.

    Raises:
        ByteSizeError: the budget is no number of bytes.
        AdaptiveUsageError: the share or the margin can't be read, or nobody tells what is free.
    """
    if not 0 <= margin < 1:
        raise AdaptiveUsageError(
            f"plan() got margin={margin!r}. It is a share of the budget, from 0 to below 1."
        )
    share = parse_share(budget)
    if share is None:
        return int(parse_bytes(budget) * (1 - margin))
    if not share:
        raise AdaptiveUsageError(
            f"plan() got budget={budget!r}. A share goes from above 0% to 100%."
        )
    work = evaluation.work
    meter = meter_for(str(work.device))
    if meter is None:
        raise AdaptiveUsageError(
            f"plan() can't tell how much of {work.device} is free, of which budget= is a share. "
            'Give it in bytes, such as "24GiB".'
        )
    there = [*work.tensors(), *work.gradients()]
    held = [each for each in there if each.device == work.device and not is_fake(each)]
    return total_bytes(held) + int(meter.available_bytes() * share * (1 - margin))


def _too_large(evaluation: _Evaluation, allowed_bytes: int) -> OutOfRetriesError:
    """Return the error, with the bytes of the best size, and changes that lower them."""
    known: dict[int, PeakReport] = {}
    for (size, _), (report, _) in evaluation.known.items():
        # all samples may take more than the first ones
        known[size] = max(known.get(size, report), report, key=attrgetter("needed_bytes"))
    # not always the smallest
    size, report = min(known.items(), key=lambda each: each[1].needed_bytes)
    needed_bytes, fn = report.needed_bytes, evaluation.spec.fn
    name = getattr(fn, "__name__", type(fn).__name__)
    # what the allocator and kernels take on top is about the same with each change
    beside_bytes = needed_bytes - report.peak_bytes
    enough = [each for each in report.advice if each.peak_bytes + beside_bytes <= allowed_bytes]
    some = [each for each in report.advice if each.saves_bytes > 0]
    told = listed([f"{each.what} ({format_bytes(each.peak_bytes)})" for each in enough or some], 4)
    if enough:
        help_ = f"With one of these it would fit: {told}."
    else:
        help_ = f"Lower, but not enough alone: {told}. " if some else ""
        help_ += "Take a smaller model or smaller samples, or a larger device."
    return OutOfRetriesError(
        f"plan() finds no micro-batch of {name!r} that fits: {counted(size, 'sample')} at a time "
        f"would take {format_bytes(needed_bytes)} on {report.device}, "
        f"{format_bytes(needed_bytes - allowed_bytes)} more than the {format_bytes(allowed_bytes)} "
        f"that there are: {by_category(report.categories)}. Nothing was run. {help_}",
        tuple(known),
        least=(size, needed_bytes),
    )
