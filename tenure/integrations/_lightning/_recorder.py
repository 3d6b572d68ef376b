"""What a `training_step` does beside its loss, kept for each micro-batch until the step has worked.

Invariant: what a failed attempt, a trial or a verification logs, returns or gives to a metric is
forgotten with it; of the attempt that worked, all is told once, as for the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from .._joined import Joiner, NumberRules, detached, learn_log, log_of
from ._metrics import MetricCall, MetricRecorder, joined_call, learn_call, run_with

T = TypeVar("T")
_running: ContextVar[StepRecorder | None] = ContextVar("_running", default=None)
_rules: WeakKeyDictionary[Any, NumberRules] = WeakKeyDictionary()
"""By the module that logs, returns and feeds metrics."""
_ADVICE = (
    "Say what is right with reduce_fx= ('mean', 'sum', 'max' or 'min'), or log a metric of "
    "torchmetrics, which is told the whole batch."
)


@dataclass(slots=True)
class BatchPart:
    """What one micro-batch did.

    Attributes:
        logs: names, values and options of `self.log`, in order.
        calls: calls of metrics, in order; none where the batch is whole.
        loss: what was returned as the loss, without its graph; None if that is no tensor.
        weight: what that is a mean over, where `weight=` says so.
        is_skipped: whether None was returned, so that the batch is to be skipped.
        extra: the rest of the dict that was returned.
    """

    logs: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    calls: list[MetricCall] = field(default_factory=list)
    loss: Tensor | None = None
    weight: Any = None
    is_skipped: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


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
        logs_loss: whether what is returned is the loss itself, so that what is logged may be it.
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
        self.logs_loss = self._returns_loss and not {"then", "once"} & options.keys()
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
            returned = self._metrics.run(None if is_whole else part.calls, run)
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
        self._part.logs.append((name, detached(value), options))

    def _loss_of(self, returned: Any, part: BatchPart) -> Any:
        if not self._returns_loss:
            return returned
        if isinstance(returned, Mapping):
            part.extra = {k: detached(v) for k, v in returned.items() if k != "loss"}
            if returned.get("loss") is None:
                raise AdaptiveUsageError(
                    f"{type(self.module).__name__}.training_step() returned a dict without "
                    '"loss". Return the loss under that key, a tensor, or None to skip the batch.'
                )
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
    parts = split.aux
    if recorder is not None and not any(part.is_skipped for part in (*whole.aux, *parts)):
        Outcome(parts, split.sizes, recorder, split.loss).learn_from(whole.aux[0])


class Outcome:
    """What the parts of a step that worked make together.

    Args:
        parts: in order.
        sizes: the samples of each.
        recorder: ran them.
        loss: the loss of the whole batch.

    Attributes:
        loss: the loss of the whole batch, of the type that the function returns.
        is_skipped: whether None was returned.

    Raises:
        AdaptiveUsageError: None was returned for some of them only.
    """

    def __init__(
        self, parts: Sequence[BatchPart], sizes: Sequence[int], recorder: StepRecorder, loss: Tensor
    ) -> None:
        self._parts = parts
        self._name = f"{type(recorder.module).__name__}.training_step"
        # sums of micro-batches in half precision are wider than that
        self.loss = loss if parts[0].loss is None else loss.to(parts[0].loss.dtype)
        of_batch = self.loss if recorder.logs_loss else None
        rules = _rules.setdefault(recorder.module, NumberRules())
        self._joiner = Joiner(parts, sizes, of_batch, rules)
        skipped = [part.is_skipped for part in parts]
        self.is_skipped = all(skipped)
        if any(skipped) and not all(skipped):
            raise AdaptiveUsageError(
                f"{self._name}() returned None for some micro-batches of a batch and a loss for "
                "others, and there is no telling what it returns for the whole. Return a loss of "
                "zero for samples that do not count, and say with weight= in adaptive_options what "
                "the mean divides by."
            )

    def extra(self) -> dict[str, Any]:
        """Return the results beside the loss."""
        self._check_alike([list(part.extra) for part in self._parts], "returned the keys")
        return {
            key: self._joiner.joined([part.extra[key] for part in self._parts], self._returned(key))
            for key in self._parts[0].extra
        }

    def _returned(self, key: str) -> str:
        return f"{key!r}, returned by {self._name}(),"

    def metric_calls(self) -> list[Callable[[], Any]]:
        """Return calls of the metrics, one for each call that every part made."""
        names = [[call.name for call in part.calls] for part in self._parts]
        self._check_alike(names, "called the metrics")
        return [
            joined_call(calls, self._joiner, self._name)
            for calls in zip(*(part.calls for part in self._parts), strict=True)
        ]

    def logs(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield the values to log."""
        names = [[name for name, _, _ in part.logs] for part in self._parts]
        self._check_alike(names, "logged")
        for each in zip(*(part.logs for part in self._parts), strict=True):
            name, values, options = each[0][0], [log[1] for log in each], [log[2] for log in each]
            yield name, *log_of(self._joiner, name, values, options, _ADVICE)

    def learn_from(self, whole: BatchPart) -> None:
        """Find out how numbers add up, where the same samples ran in one piece, too."""
        parts = (whole, *self._parts)
        if len({tuple(name for name, _, _ in part.logs) for part in parts}) == 1:
            for (name, value, _), *logs in zip(*(part.logs for part in parts), strict=True):
                learn_log(self._joiner, name, [log[1] for log in logs], value)
        if len({tuple(call.name for call in part.calls) for part in parts}) == 1:
            for call, *calls in zip(*(part.calls for part in parts), strict=True):
                learn_call(calls, call, self._joiner, self._name)
        if len({tuple(part.extra) for part in parts}) == 1:
            for key, value in whole.extra.items():
                values = [part.extra[key] for part in self._parts]
                self._joiner.learn(values, value, self._returned(key))

    def _check_alike(self, names: Sequence[Sequence[str]], did: str) -> None:
        for other in names[1:]:
            if list(other) != list(names[0]):
                raise AdaptiveUsageError(
                    f"{self._name}() {did} {_listed(names[0])} for one micro-batch and "
                    f"{_listed(other)} for another, and there is no telling what it does for the "
                    "whole batch. Do the same for each, or do it in on_train_batch_end()."
                )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
