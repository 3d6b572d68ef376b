"""What a setup takes on a rank, predicted once each, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch

from tenure._errors import CommandError, TenureError
from tenure._show import Paragraph, Part
from tenure._torch.fakes import unlogged
from tenure.adaptive import PeakReport, predict_peak
from tenure.paging import PagingPlan, plan_paging

from .._fitting import MicroBatch, in_a_line, largest_micro_batch
from ._configured import Configured, configured
from ._recipe import recipe
from ._setup import PAGED, Setup
from ._work import Batch, Made, Size, batch_of, in_memory, making, size_of

_MOST_SAMPLES = 2**20


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The peak of the rank that takes most.

    Attributes:
        found: the prediction, or the plan of a paged model.
        size: that of the whole model.
    """

    found: PeakReport | PagingPlan
    size: Size

    @property
    def needed_bytes(self) -> int:
        """What the device has to have."""
        if isinstance(self.found, PeakReport):
            return self.found.needed_bytes
        return (self.found.peak_bytes or 0) + self.found.allowance_bytes

    def fits(self, n_bytes: int) -> bool:
        """Tell whether it fits in so many bytes."""
        if isinstance(self.found, PeakReport):
            return self.found.fits(n_bytes)
        return self.needed_bytes <= n_bytes

    @property
    def host_bytes(self) -> int | None:
        """The bytes that a rank keeps in host memory; None if nothing is offloaded."""
        return self.found.host_bytes if isinstance(self.found, PeakReport) else None

    def recipe(self, setup: Setup, *, maximum: int | None = None) -> str:
        """Return the lines that train as it was predicted, in micro-batches if need be."""
        budget_bytes = 0 if isinstance(self.found, PeakReport) else self.found.budget_bytes
        blocks = self.size.blocks
        return recipe(setup, blocks=blocks, maximum=maximum, budget_bytes=budget_bytes)

    def parts(self) -> list[Part]:
        """Return the lines about it."""
        if isinstance(self.found, PeakReport):
            return list(self.found._parts())
        lines = str(self.found).split("\n")
        # not one for each unit
        return [Paragraph("", "\n".join(line for line in lines if not line.startswith("    ")))]


class Peaks:
    """Predictions for one model.

    Args:
        target: its configuration.
        device: whose memory is meant.
        show: is told what is predicted.
    """

    def __init__(self, target: str, device: str, show: Callable[[str], None]) -> None:
        show("reading the configuration")
        self.model: Configured = configured(target)
        self._device, self._show = device, show
        self._known: dict[Setup, RankPeak] = {}
        # made once for all batches: that takes as long as a prediction
        self._made: tuple[Setup, Made] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, setup: Setup) -> RankPeak:
        """Predict the first rank: shards differ by what is left over, which it never lacks.

        Raises:
            CommandError: the model can't be made, or not so.
            PredictionError: nothing can be said of it.
        """
        if setup not in self._known:
            self._show(f"{setup.words()}, {setup.batch} at a time")
            predict = self._paged if setup.optimizer == PAGED else self._whole
            self._known[setup] = predict(setup)
        return self._known[setup]

    def micro_batch(self, setup: Setup, n_bytes: int) -> MicroBatch | None:
        """Find the largest micro-batch of `step` that fits; None if the batch can't be split."""
        self._show(f"{setup.words()}, in micro-batches")
        made, batch = self._work_of(setup)
        with self._its_errors():
            return largest_micro_batch(made.fn, batch, made.optimizer, self._device, n_bytes)

    def largest_batch(self, setup: Setup, n_bytes: int) -> int:
        """Find the largest batch that fits; it was predicted, and so was one sample more.

        Its bytes grow almost as a straight line: the last two sizes tell where to look.
        """
        low, high = 0, _MOST_SAMPLES
        points: list[tuple[int, int]] = []
        n = setup.batch
        while low + 1 < high:
            peak = self.of(replace(setup, batch=n))
            if peak.fits(n_bytes):
                low = n
            else:
                high = n
            points.append((n, peak.needed_bytes))
            # where the line leads to what is known: by halves, or doubled as long as all fit
            n = 2 * low if low and high == _MOST_SAMPLES else (low + high) // 2
            guess = _guess(points[-2:], n_bytes)
            if guess is not None and low < guess < high:
                n = guess
        return low

    def _whole(self, setup: Setup) -> RankPeak:
        made, batch = self._work_of(setup)
        with self._its_errors():
            found = predict_peak(made.fn, batch, optimizer=made.optimizer, device=self._device)
        return RankPeak(found, made.size)

    def _work_of(self, setup: Setup) -> tuple[Made, Batch]:
        alike = replace(setup, batch=1)
        if self._made is None or self._made[0] != alike:
            self._made = None
            self._stack.close()
            self._made = alike, self._stack.enter_context(making(setup, self.model))
        # ids have data: of too many, there is no memory for them
        with self._its_errors():
            return self._made[1], batch_of(setup, self.model)

    def _paged(self, setup: Setup) -> RankPeak:
        model, batch = in_memory(setup, self.model, torch.device("meta"))
        with self._its_errors():
            found = plan_paging(model, self._device, inputs=batch, training=True)
        return RankPeak(found, size_of(model))

    @contextmanager
    def _its_errors(self) -> Iterator[None]:
        """Return a block in which an error of the model is told as one of its configuration."""
        try:
            with unlogged():
                yield
        except TenureError:
            raise
        # whatever the code of a model raises
        except Exception as error:
            hint = " With --images 0 text alone is counted." if self.model.images(None) else ""
            if self.model.longest:
                hint += f" It is made for at most {self.model.longest} tokens."
            raise CommandError(
                f"A {self.model.config.model_type} fails on a batch of its configuration: "
                f"{in_a_line(error)}.{hint}"
            ) from None


def _guess(points: list[tuple[int, int]], n_bytes: int) -> int | None:
    """Return the size that takes so many bytes by the line through two; None where they have none.

    Args:
        points: sizes and their bytes, the latest last.
        n_bytes: what there is.
    """
    if len(points) < 2:
        return None
    (other, other_bytes), (n, needed_bytes) = points
    slope = (needed_bytes - other_bytes) / (n - other)
    return n + int((n_bytes - needed_bytes) // slope) if slope > 0 else None
