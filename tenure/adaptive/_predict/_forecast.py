"""What sizes of a piece of work would need, asked of predictions; nothing where one fails.

Invariant: whatever goes wrong in a prediction, no error leaves it, unless a tensor without data is
left in a cache; and an optimizer has stepped nothing: its state would be that of such tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .._memory import counting_on, meter_for
from ._predict import report_of
from ._report import PeakReport
from ._work import Work

_logger = logging.getLogger("tenure.adaptive")


class Forecast:
    """The bytes that sizes of a piece of work need beside what is there.

    Args:
        name: what the log calls the work.
        work: gets a size; its result is ignored. It runs on tensors without data, once for each
            size that is asked for.
        given: what it gets beside the size: tensors, in containers.
        device: whose memory is meant, as of `predict_peak`.

    Attributes:
        works: whether all predictions so far succeeded.
    """

    __slots__ = ("_device", "_given", "_known", "_name", "_work", "works")

    def __init__(
        self,
        name: str,
        work: Callable[..., object],
        *given: object,
        device: torch.device | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._given = given
        self._device = device
        self._known: dict[int, int] = {}
        self.works = True

    def __call__(self, size: int) -> int:
        """Return the bytes of one size; if unpredictable, in proportion to another, or 0."""
        if size not in self._known and self.works:
            self._predict(size)
        if size in self._known or not self._known:
            return self._known.get(size, 0)
        # for one that is none of those that could be predicted
        nearest = min(self._known, key=lambda known: abs(known - size))
        return -(-self._known[nearest] * size // nearest)

    def _predict(self, size: int) -> None:
        function = self._work

        # what a search for a size ignores: the result is not run backward
        def ignoring(size: int, *given: object) -> None:
            function(size, *given)

        work: Work | None = None
        try:
            work = Work(ignoring, (size, *self._given), {}, None, self._device)
            # what a budget counts is what it refuses
            is_counted = bool(counting_on(str(work.device)))
            work.may_step = False
            report = report_of(work, is_counted=is_counted)
        # of the work, which may do anything, or of what has no fakes
        except Exception as error:
            # a cache that keeps tensors without data has to be emptied before anything trains
            if work is not None and work.leaves_fakes:
                raise
            self.works = False
            first_line = str(error).partition("\n")[0]
            _logger.info(
                "%r goes on without predictions: size %d could not be predicted (%s: %s)",
                self._name, size, type(error).__name__, first_line,
            )  # fmt: skip
        else:
            self._known[size] = _bytes_beside(report)


def _bytes_beside(report: PeakReport) -> int:
    """Return the bytes that must be free beside those in use, as that memory is counted."""
    meter = meter_for(report.device)
    held_bytes, reserved_bytes = report._held_bytes, report.reserved_bytes
    if held_bytes is None or reserved_bytes is None or meter is None or not meter.is_in_segments:
        return max(0, report.peak_bytes - report.baseline_bytes)
    needed_bytes = max(0, reserved_bytes - held_bytes) + report.allowance_bytes
    # an allocator that is short of memory gives back what it caches, and may need no more then
    free_bytes = meter.available_bytes()
    runs_within = report._runs_within
    if needed_bytes > free_bytes and runs_within is not None:
        limit_bytes = held_bytes + free_bytes - report.allowance_bytes
        return free_bytes if runs_within(limit_bytes) else needed_bytes
    return needed_bytes
