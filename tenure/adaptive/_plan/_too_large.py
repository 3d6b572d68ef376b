"""What is said where no micro-batch fits."""

from __future__ import annotations

from tenure._errors import OutOfRetriesError
from tenure._text import counted, format_bytes, listed

from .._predict import PeakReport
from ._evaluation import Evaluation
from ._report import by_category


def too_large(evaluation: Evaluation, allowed_bytes: int) -> OutOfRetriesError:
    """The error, with what the size that takes least would take, and what would lower that."""
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
