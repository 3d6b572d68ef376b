"""What a `training_step` does beside its loss, kept for each micro-batch until the step has worked.

Invariant: what a failed attempt, a trial or a verification logs, returns or gives to a metric is
forgotten with it; of the attempt that worked, all is told once, as for the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from .._joined import BatchPart, Joiner, NumberRules, StepEvent, detached, side_by_side
from ._metrics import MetricRecorder, run_with

T = TypeVar("T")
_running: ContextVar[StepRecorder | None] = ContextVar("_running", default=None)
_rules: WeakKeyDictionary[Any, NumberRules] = WeakKeyDictionary()
"""By the module that logs, returns and feeds metrics."""
_ADVICE = (
    "Say what is right with reduce_fx= ('mean', 'sum', 'max' or 'min'), or log a metric of "
    "torchmetrics, which is told the whole batch."
)
_DID = {"metric": "called the metrics", "log": "logged", "return": "returned the keys"}
"""The kinds of events, in the order in which they are told: metrics first, which logs may read."""


class StepRecorder:
    """Runs the `training_step` of a module on its batch, or on parts of it.

    Args:
        module: has the `training_step`.
        batch: the whole batch.
        others: what `training_step` gets beside the batch by position.
        named: the same by name.
        options: the arguments of `step`.

    Attributes:
        module: has the `training_step`.
    """

    def __init__(
        self,
        module: Any,
        batch: Any,
        others: Sequence[Any],
        named: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.module = module
        # what is looked for in a function, such as tensors, must not be found here
        self._whole = id(batch)
        self._others, self._named = others, named
        self._weight = options.get("weight")
        self._returns_loss = not callable(options.get("loss"))
        # whether what is returned is the loss itself, so that what is logged may be it
        self._logs_loss = self._returns_loss and not {"then", "once"} & options.keys()
        self._metrics = MetricRecorder(module)
        self._part: BatchPart | None = None

    def hearing(self, work: Callable[[], T]) -> T:
        """Run work in which the module's `log` comes here."""
        return run_with(_running, self, work)

    def run(self, function: Callable[..., Any], batch: Any) -> tuple[Any, BatchPart]:
        """Run it on the batch or a part of it; what it returns as its loss, and the rest."""
        self._part = part = BatchPart()
        # of the batch itself they are called as always, and brought back if that fails
        is_whole = id(batch) == self._whole
        try:
            run = functools.partial(function, self.module, batch, *self._others, **self._named)
            returned = self._metrics.run(None if is_whole else part.events, run)
        finally:
            self._part = None
        if self._weight is not None and not is_whole:
            with torch.no_grad():
                part.weight = self._weight(batch)
        return self._loss_of(returned, part), part

    def log(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Keep what is logged."""
        if self._part is None:
            raise AdaptiveUsageError(
                f"self.log({name!r}, ...) was called in loss=, then=, once= or weight= of "
                "adaptive_options, which may run for a few samples or several times. Log the loss "
                'in on_train_batch_end(), from outputs["loss"].'
            )
        self._part.events.append(StepEvent("log", name, detached(value), options))

    def learn(self, whole: BatchPart, parts: Sequence[BatchPart], joiner: Joiner) -> None:
        """Find out how numbers add up, where the same few samples ran in one piece, too."""
        for kind in _DID:
            for first, *others in side_by_side([whole, *parts], kind) or ():
                joiner.learn_event(first, others, self._place(first))

    def told(self, parts: Sequence[BatchPart], joiner: Joiner) -> list[StepEvent]:
        """Return what the whole batch does, once for what every part did.

        Raises:
            AdaptiveUsageError: the parts did different things, or what can't be joined.
        """
        made = []
        for kind, did in _DID.items():
            events = side_by_side(parts, kind)
            if events is None:
                names = [[e.name for e in part.events if e.kind == kind] for part in parts]
                other = next(each for each in names if each != names[0])
                raise AdaptiveUsageError(
                    f"{self._name}() {did} {_listed(names[0])} for one micro-batch and "
                    f"{_listed(other)} for another, and there is no telling what it does for the "
                    "whole batch. Do the same for each, or do it in on_train_batch_end()."
                )
            made += [joiner.event(each, self._place(each[0]), _ADVICE) for each in events]
        return made

    def joiner(self, parts: Sequence[BatchPart], sizes: Sequence[int], loss: Tensor) -> Joiner:
        """Return what joins the parts of a batch with that loss."""
        rules = _rules.setdefault(self.module, NumberRules())
        return Joiner(parts, sizes, loss if self._logs_loss else None, rules)

    def is_skipped(self, parts: Sequence[BatchPart]) -> bool:
        """Return whether None was returned, to skip the batch.

        Raises:
            AdaptiveUsageError: it was for some of the parts only.
        """
        skipped = [part.is_skipped for part in parts]
        if any(skipped) and not all(skipped):
            raise AdaptiveUsageError(
                f"{self._name}() returned None for some micro-batches of a batch and a loss for "
                "others, and there is no telling what it returns for the whole. Return a loss of "
                "zero for samples that do not count, and say with weight= in adaptive_options what "
                "the mean divides by."
            )
        return all(skipped)

    @property
    def _name(self) -> str:
        return f"{type(self.module).__name__}.training_step"

    def _place(self, event: StepEvent) -> str:
        """Return what errors and warnings call the value of an event."""
        if event.kind == "log":
            return f"{event.name!r} was logged"
        if event.kind == "metric":
            return f"what {self._name}() gave the metric {event.name!r}"
        return f"{event.name!r}, returned by {self._name}(),"

    def _loss_of(self, returned: Any, part: BatchPart) -> Any:
        if not self._returns_loss:
            return returned
        if isinstance(returned, Mapping):
            if returned.get("loss") is None:
                raise AdaptiveUsageError(
                    f"{type(self.module).__name__}.training_step() returned a dict without "
                    '"loss". Return the loss under that key, a tensor, or None to skip the batch.'
                )
            part.events += [
                StepEvent("return", key, detached(value))
                for key, value in returned.items()
                if key != "loss"
            ]
            returned = returned["loss"]
        if returned is None:
            part.is_skipped = True
            # what moves nothing: only the end of the step can skip it
            return torch.zeros((), device=self.module.device, requires_grad=True)
        part.loss = returned.detach() if isinstance(returned, Tensor) else None
        return returned


def recorder_of(module: object) -> StepRecorder | None:
    """Return the step of a module that runs now."""
    recorder = _running.get()
    return recorder if recorder is not None and recorder.module is module else None


def note_compared(whole: Any, split: Any) -> None:
    """Find out how logged values add up, from a few samples that ran whole and in parts."""
    recorder = _running.get()
    if recorder is not None and not any(part.is_skipped for part in (*whole.aux, *split.aux)):
        joiner = recorder.joiner(split.aux, split.sizes, split.loss)
        recorder.learn(whole.aux[0], split.aux, joiner)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
