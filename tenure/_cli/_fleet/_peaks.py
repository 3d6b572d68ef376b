"""What a setup takes on a rank, predicted once each, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tenure._errors import CommandError, TenureError
from tenure._show import Paragraph, Part
from tenure.adaptive import PeakReport, predict_peak
from tenure.paging import PagingPlan, plan_paging

from .._fitting import MicroBatch, largest_micro_batch
from ._configured import Configured, configured
from ._setup import PAGED, Setup
from ._work import exchanged_bytes_of, in_memory, making

_MOST_SAMPLES = 2**20


@dataclass(frozen=True, slots=True)
class Peak:
    """What one rank takes.

    Attributes:
        found: the prediction, or the plan of a paged model.
        n_parameters: of the whole model.
        n_trained: how many of them are trained.
        exchanged_bytes: what the rank sends to others in a step.
    """

    found: PeakReport | PagingPlan
    n_parameters: int
    n_trained: int
    exchanged_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What the device has to have."""
        if isinstance(self.found, PeakReport):
            return self.found.needed_bytes
        return (self.found.peak_bytes or 0) + self.found.allowance_bytes

    def fits(self, n_bytes: int) -> bool:
        """Whether it fits in so many bytes."""
        if isinstance(self.found, PeakReport):
            return self.found.fits(n_bytes)
        return self.needed_bytes <= n_bytes

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
        self.model: Configured = configured(target)
        self._device, self._show = device, show
        self._known: dict[tuple[Setup, int], Peak] = {}

    def of(self, setup: Setup, rank: int = 0) -> Peak:
        """Predict what a rank takes.

        Raises:
            CommandError: the model can't be made, or not so.
            PredictionError: nothing can be said of it.
        """
        key = setup, rank
        if key not in self._known:
            self._show(f"{setup.words()}, {setup.batch} at a time")
            self._known[key] = self._paged(setup) if setup.optimizer == PAGED else self._whole(*key)
        return self._known[key]

    def micro_batch(self, setup: Setup, n_bytes: int) -> MicroBatch | None:
        """Find the largest micro-batch of `step` that fits; None if the batch can't be split."""
        self._show(f"{setup.words()}, in micro-batches")
        with making(setup, self.model) as made, self._its_errors():
            return largest_micro_batch(made.fn, made.batch, made.optimizer, self._device, n_bytes)

    def largest_batch(self, setup: Setup, n_bytes: int) -> int:
        """Find the largest batch that fits; it was predicted, and so was one sample more.

        What a step takes grows almost as a straight line: two sizes tell where to look.
        """

        def needed(n: int) -> int:
            return self.of(replace(setup, batch=n)).needed_bytes

        def fits(n: int) -> bool:
            return self.of(replace(setup, batch=n)).fits(n_bytes)

        low, high = 0, _MOST_SAMPLES
        n = setup.batch
        while low + 1 < high:
            if fits(n):
                low = n
            else:
                high = n
            other = max(1, n // 2)
            slope = (needed(n) - needed(other)) / (n - other) if n > other else 0
            guess = n + int((n_bytes - needed(n)) / slope) if slope > 0 else 2 * n
            n = min(max(guess, low + 1), high - 1)
        return low

    def _whole(self, setup: Setup, rank: int) -> Peak:
        with making(setup, self.model, rank) as made, self._its_errors():
            found = predict_peak(made.fn, made.batch, optimizer=made.optimizer, device=self._device)
            return Peak(found, made.n_parameters, made.n_trained, made.exchanged_bytes)

    @contextmanager
    def _its_errors(self) -> Iterator[None]:
        """A block in which an error of the model is told as one of its configuration."""
        try:
            yield
        except TenureError:
            raise
        # whatever the code of a model raises
        except Exception as error:
            told = str(error).partition("\n")[0].rstrip(".")
            raise CommandError(
                f"A {self.model.config.model_type} fails on a batch of its configuration: "
                f"{type(error).__name__}: {told}."
            ) from None

    def _paged(self, setup: Setup) -> Peak:
        model, batch = in_memory(setup, self.model, torch.device("meta"))
        numbers = [p.numel() for p in model.parameters()]
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        with self._its_errors():
            found = plan_paging(model, self._device, inputs=batch, training=True)
        return Peak(found, sum(numbers), sum(trained), exchanged_bytes_of(model, setup))
