"""What memory does from one training step to the next: figures for a log, and what errors leave.

Invariant: nothing is changed, and no tensor is kept alive; looking at all tensors takes no more
than a share of the time that passes, the first looks aside.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from tenure._devices import accelerator_of, counters_of
from tenure._errors import OutOfRetriesError
from tenure._text import counted, format_bytes
from tenure.adaptive import is_oom, statistics
from tenure.profiler import GrowthWatch, Snapshot, snapshot

if TYPE_CHECKING:
    from tenure.adaptive import StepResult

_logger = logging.getLogger("tenure.memory")
# What loops fetch ahead lives for two steps and is no leak.
_STEPS_BETWEEN_LOOKS = 3
_MAX_NAMED = 5
# So many tell of a leak: without them, a short training would not say whether there is one.
_LOOKS_AT_ONCE = 3


class MemoryWatch:
    """Looks at a training loop that calls it; for the callbacks of any library.

    A look at all tensors costs some tenths of a second, so that there is one only so often as it
    takes no more than a share of the time; but the first ones, at steps 1, 4 and 7, come whatever
    they take. From the third on they tell which places hold more at each look.

    Args:
        share: the share of the time that looks may take; infinite for one each third step.

    Example:
        >>> import torch
        >>> from tenure.integrations._memory_watch import MemoryWatch
        >>> watch, history = MemoryWatch(share=float("inf")), []
        >>> watch.begin()
        >>> for _ in range(9):
        ...     history.append(torch.ones(256))
        ...     watch.step_ended()
        >>> watch.figures()["memory/outlived_tensors"]
        6
    """

    def __init__(self, share: float = 0.03) -> None:
        self._share = share
        self.begin()

    def begin(self, device: str | torch.device | None = None) -> None:
        """Training begins, maybe once more.

        Args:
            device: whose memory the figures count; None for the host.
        """
        self._device = device
        self._first: Snapshot | None = None
        self._last: Snapshot | None = None
        self._counted: Snapshot | None = None
        self._growth = GrowthWatch()
        self._told: set[str] = set()
        self._n_steps = 0
        self._micro_batch: int | None = None
        self._allocated: int | None = None
        self._n_ooms = statistics().ooms
        self._steps_to_wait = 0
        self._due = 0.0

    def step_ended(self, result: StepResult | None = None) -> None:
        """Note that the optimizer has stepped; cheap enough for every step.

        Args:
            result: of its `step`, where it was one.
        """
        if result is not None:
            self._micro_batch = result.micro_batch
        self._n_steps += 1
        self._steps_to_wait -= 1
        if self._steps_to_wait > 0:
            return
        if self._growth.n_looks < _LOOKS_AT_ONCE or time.perf_counter() >= self._due:
            self._look()

    def figures(self) -> dict[str, float]:
        """Return the figures to log, since the last call.

        ``memory/allocated_bytes`` and ``memory/growth_bytes``: of the device's allocator, or on the
        host those of all tensors, where there was a look meanwhile. ``memory/outlived_tensors`` and
        ``memory/outlived_bytes``: by how much those places grew that held more at each look
        than at the one before. ``adaptive/micro_batch``: the last one, of a step.
        ``adaptive/retries``: attempts that ran out of memory.
        """
        figures: dict[str, float] = {}
        allocated = self._allocated_bytes()
        if allocated is not None:
            figures["memory/allocated_bytes"] = allocated
            if self._allocated is not None:
                figures["memory/growth_bytes"] = allocated - self._allocated
            self._allocated = allocated
        if self._growth.n_looks >= _LOOKS_AT_ONCE:
            found = self._growth.growth()
            grown = [each.n_tensors - each.n_before for each in found]
            figures["memory/outlived_tensors"] = sum(grown)
            figures["memory/outlived_bytes"] = sum(each.grown_bytes for each in found)
        if self._micro_batch is not None:
            figures["adaptive/micro_batch"] = self._micro_batch
        # the program may have set its count to zero meanwhile
        n_ooms, self._n_ooms = statistics().ooms - self._n_ooms, statistics().ooms
        figures["adaptive/retries"] = max(n_ooms, 0)
        return figures

    def died(self, error: BaseException, advice: str = "") -> str | None:
        """Training ended with an error; if it is one of memory, tell what holds that.

        To be called while the error is handled or held, so that what it keeps is still there. The
        text is logged, and stands below the error's traceback as a note.

        Args:
            error: what it ended with.
            advice: what the text ends with.

        Returns:
            The text; None for any other error.
        """
        if not (is_oom(error) or isinstance(error, OutOfRetriesError)):
            return None
        text = "\n".join(filter(None, (self.report(), advice)))
        _logger.error("%s", text)
        error.add_note(text)
        return text

    def report(self) -> str:
        """Return what holds memory now, and what has grown since the first scan, in a few lines."""
        now = snapshot()
        rows = sorted(now.records, key=lambda row: -row.n_bytes)
        parts = [
            f"{format_bytes(n_bytes)} {name}"
            for name, n_bytes in now.report.categories.items()
            if n_bytes
        ]
        lines = [
            f"tenure: {format_bytes(now.total_bytes)} in {counted(len(now), 'storage')}: "
            f"{', '.join(parts)}."
        ]
        lines += [f"  {format_bytes(row.n_bytes)}: {row}" for row in rows[:_MAX_NAMED]]
        findings = now.findings if self._first is None else now.diff(self._first).findings
        lines += [f"  {finding}" for finding in findings[:_MAX_NAMED]]
        return "\n".join(lines)

    def _allocated_bytes(self) -> int | None:
        found = accelerator_of(self._device)
        if found is not None:
            return counters_of(*found).allocated
        # on the host a look alone tells
        if self._last is None or self._last is self._counted:
            return None
        self._counted = self._last
        return sum(each.total_bytes for each in self._last.report.devices if each.device == "cpu")

    def _look(self) -> None:
        began = time.perf_counter()
        self._last = self._growth.look(self._n_steps)
        self._first = self._first or self._last
        for each in self._growth.growth():
            if each.name not in self._told:
                self._told.add(each.name)
                _logger.warning("%s", each)
        ended = time.perf_counter()
        self._due = ended + (ended - began) / self._share
        self._steps_to_wait = _STEPS_BETWEEN_LOOKS
