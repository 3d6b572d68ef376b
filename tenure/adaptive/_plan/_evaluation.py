"""What a step takes with micro-batches of some size: the step itself, on tensors without data."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tenure._torch.fakes import is_fake
from tenure._torch.storages import key_of

from .._advice import WITH_INNER
from .._predict import PeakReport, Work, predict_peak
from .._step import SampleTree, StepSpec, step_at_size

# the first, one beside its gradients, one more, and the last with a partner of the one before
_ENOUGH = 5


class _Sizes:
    """What a step that was predicted tells; a list would be as before when the prediction ends."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: tuple[int, ...] = ()


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
        self._work = Work(self._step_of(1, _Sizes()), (spec.batch,), {}, optimizer, device)
        self._tree = SampleTree(spec.batch, spec.in_dims, name="batch", argument="in_dims")
        self._n_samples = self._tree.n_samples()
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
        """What the work holds on the device already."""
        held = {
            key_of(each.untyped_storage()): each.untyped_storage().nbytes()
            for each in [*self._work.tensors(), *self._work.gradients()]
            if each.device == self.device and not is_fake(each)
        }
        return sum(held.values())

    def fits(self, size: int, allowed_bytes: int, *, in_full: bool = False) -> bool:
        """Whether micro-batches of a size fit; where not in full, their first ones and the last."""
        return self.report(size, in_full=in_full)[0].fits(allowed_bytes)

    def report(self, size: int, *, in_full: bool = True) -> tuple[PeakReport, tuple[int, ...]]:
        """What a size takes, and the samples of each micro-batch."""
        length = self._length(size, in_full)
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
        """Which of the sizes that were evaluated takes least: not always the smallest."""
        known = [(size, report) for (size, _), (report, _) in self._known.items()]
        return min(known, key=lambda each: each[1].needed_bytes)

    def _length(self, size: int, in_full: bool) -> int:
        """The samples that have to run: micro-batches in the middle are one like the other."""
        n = self._n_samples
        has_graph = any(isinstance(x, Tensor) and x.requires_grad for x in self._leaves())
        # outputs pile up with each, and so do gradients of the batch
        if in_full or callable(self.spec.loss) or has_graph:
            return n
        n_middle = max(n // size - _ENOUGH, 0)
        return n - n_middle * size

    def _leaves(self) -> list[Any]:
        return [leaf.value for leaf in self._tree.leaves]

    def _step_of(
        self, size: int, sizes: _Sizes, length: int | None = None, around: Any = None
    ) -> Any:
        """A function of the batch that runs the step on the first of its samples.

        Args:
            size: the samples of a micro-batch.
            sizes: gets the samples of each.
            length: how many samples are run; None: all.
            around: makes the function that runs instead of the step's own.
        """
        spec = self.spec if around is None else replace(self.spec, fn=around(self.spec.fn))
        loss = spec.loss if callable(spec.loss) else None
        reached = (self.spec.fn, spec.model, loss, spec.then, spec.once)

        # as a default, what these use is found, and named as their code names it
        def run(batch: Any, _reached: Any = reached) -> None:
            part = batch if length in (None, self._n_samples) else self._first(batch, length)
            sizes.parts = step_at_size(replace(spec, batch=part), size).sizes

        setattr(run, WITH_INNER, functools.partial(self._step_of, size, sizes, length))
        return run

    def _first(self, batch: Any, length: Any) -> Any:
        tree = SampleTree(batch, self.spec.in_dims, name="batch", argument="in_dims")
        # views: the batch is there as a whole
        return tree.with_leaves([leaf.part(0, length) for leaf in tree.leaves])
