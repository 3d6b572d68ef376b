"""The largest micro-batch of a step that fits, found by running the step on tensors without data.

Invariant: what a plan says was evaluated, and so was that one sample more does not fit; nothing is
extrapolated, for the peak of a step is no straight line of its micro-batches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._errors import AdaptiveUsageError, OutOfRetriesError
from tenure._show import steps
from tenure._text import counted, format_bytes, listed, parse_bytes, parse_share
from tenure._torch.compiler import never_compiled

from .._memory import meter_for
from .._predict import PeakReport
from .._sizes import checked_size, largest_predicted
from .._step import BatchNormPolicy, Reduction, SampleDims, SampleTree, StepSpec
from ._evaluation import Evaluation
from ._report import Plan, by_category, plan_of

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
    n_samples = SampleTree(batch, in_dims, name="batch", argument="in_dims").n_samples()
    fewest, most = _limits(minimum, maximum, n_samples, batchnorm)
    evaluation = Evaluation(spec, optimizer, device)
    allowed = _allowed_bytes(budget, margin, evaluation.device, evaluation.held_bytes())
    with steps("plan") as show:

        def bytes_at(size: int, in_full: bool = False) -> int:
            show(f"micro-batch {size}")
            report, _ = evaluation.report(size, in_full=in_full)
            # an allocator that gives back what it caches may have room for more than the budget
            return min(report.needed_bytes, allowed if report.fits(allowed) else sys.maxsize)

        found = largest_predicted(bytes_at, fewest, most, allowed, is_exact=True)
        # what a long step piles up is seen only when all of it runs
        in_full = functools.partial(bytes_at, in_full=True)
        while fewest < found and in_full(found) > allowed:
            found = largest_predicted(in_full, fewest, found - 1, allowed, is_exact=True)
        if max(bytes_at(found), in_full(found)) > allowed:
            raise _too_large(evaluation, allowed)
    report, sizes = evaluation.report(found)
    return plan_of(report, found, sizes, allowed)


def _limits(minimum: int, maximum: int | None, n_samples: int, batchnorm: str) -> tuple[int, int]:
    fewest = checked_size("minimum", minimum)
    most = max(n_samples, 1)
    if maximum is not None:
        most = min(most, checked_size("maximum", maximum))
    if most < (fewest := min(fewest, max(n_samples, 1))):
        raise AdaptiveUsageError(
            f"plan() got maximum={maximum}, below minimum={minimum}. Raise it."
        )
    return fewest, most


def _allowed_bytes(budget: int | str, margin: float, device: torch.device, held_bytes: int) -> int:
    """Return the bytes that may be alive on a device at the peak.

    Args:
        budget: bytes in all, or like ``"24GiB"``; or ``"80%"`` of what is free now, beside what the
            work holds already.
        margin: the share of it to be left.
        device: whose memory it is.
        held_bytes: what the work holds on the device already.

    Raises:
        ByteSizeError: it is no number of bytes.
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
    return held_bytes + int(_free_bytes(device) * share * (1 - margin))


def _free_bytes(device: torch.device) -> int:
    meter = meter_for(str(device))
    if meter is None:
        raise AdaptiveUsageError(
            f"plan() can't tell how much of {device} is free, of which budget= is a share. Give "
            'it in bytes, such as "24GiB".'
        )
    return meter.available_bytes()


def _too_large(evaluation: Evaluation, allowed_bytes: int) -> OutOfRetriesError:
    """Return the error, with the bytes of the best size, and changes that lower them."""
    size, report = evaluation.least()
    over_bytes = report.needed_bytes - allowed_bytes
    name = getattr(evaluation.spec.fn, "__name__", type(evaluation.spec.fn).__name__)
    return OutOfRetriesError(
        f"plan() finds no micro-batch of {name!r} that fits: {counted(size, 'sample')} at a time "
        f"would take {format_bytes(report.needed_bytes)} on {report.device}, "
        f"{format_bytes(over_bytes)} more than the {format_bytes(allowed_bytes)} that there are: "
        f"{by_category(report.categories)}. Nothing was run. {_help(report, allowed_bytes)}",
        evaluation.sizes,
        least=(size, report.needed_bytes),
    )


def _help(report: PeakReport, allowed_bytes: int) -> str:
    # what the allocator and kernels take on top is about the same with each change
    beside_bytes = report.needed_bytes - report.peak_bytes
    enough = [each for each in report.advice if each.peak_bytes + beside_bytes <= allowed_bytes]
    some = [each for each in report.advice if each.saves_bytes > 0]
    told = [f"{each.what} ({format_bytes(each.peak_bytes)})" for each in enough or some]
    if enough:
        return f"With one of these it would fit: {listed(told, 4)}."
    lower = f"Lower, but not enough alone: {listed(told, 4)}. " if told else ""
    return f"{lower}Take a smaller model or smaller samples, or a larger device."
