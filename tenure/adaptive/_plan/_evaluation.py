"""What a step takes with micro-batches of some size: the step itself, on tensors without data."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim import Optimizer

from tenure._torch.fakes import is_fake
from tenure._torch.storages import key_of

from .._advice import WITH_INNER
from .._predict import PeakReport, Work, predict_peak
from .._step import SizedStep, StepOutcome, StepSpec


class _Sizes:
    """What a step that was predicted tells; a list would be as before when the prediction ends."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: tuple[int, ...] = ()

    def note(self, outcome: StepOutcome) -> None:
        self.parts = outcome.sizes


class Evaluation:
    """Predicts a step, each size once.

    Args:
        spec: the step.
        optimizer: steps after it, or None.
        device: whose memory is meant; None: that of the weights.
    """

    def __init__(
        self, spec: StepSpec, optimizer: Optimizer | None, device: torch.device | str | None
    ) -> None:
        self.spec = spec
        self._optimizer, self._device = optimizer, device
        self._step = SizedStep(spec)
        self._n_samples = self._step.n_samples
        run = self._step_of(1, _Sizes(), self._n_samples)
        self._work = Work(run, (spec.batch,), {}, optimizer, device)
        self._known: dict[tuple[int, bool], tuple[PeakReport, tuple[int, ...]]] = {}

    @property
    def device(self) -> torch.device:
        """Whose memory it is."""
        return self._work.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that were evaluated, in order."""
        return tuple(dict.fromkeys(size for size, _ in self._known))

    def held_bytes(self) -> int:
        """Return the bytes that the work holds on the device already."""
        held = {
            key_of(each.untyped_storage()): each.untyped_storage().nbytes()
            for each in [*self._work.tensors(), *self._work.gradients()]
            if each.device == self.device and not is_fake(each)
        }
        return sum(held.values())

    def report(self, size: int, *, in_full: bool = True) -> tuple[PeakReport, tuple[int, ...]]:
        """Return the peak of a size, and the samples of each micro-batch."""
        length = self._n_samples if in_full else self._step.length(size)
        key = size, length == self._n_samples
        if key not in self._known:
            sizes = _Sizes()
            report = predict_peak(
                self._step_of(size, sizes, length),
                self.spec.batch,
                optimizer=self._optimizer,
                device=self._device,
            )
            self._known[key] = report, sizes.parts
        return self._known[key]

    def least(self) -> tuple[int, PeakReport]:
        """Return which of the sizes that were evaluated takes least: not always the smallest."""
        known = [(size, report) for (size, _), (report, _) in self._known.items()]
        return min(known, key=lambda each: each[1].needed_bytes)

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
