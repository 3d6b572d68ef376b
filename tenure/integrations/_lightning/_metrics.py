"""Metrics in a `training_step`: called once for the whole batch, with what its parts gave them.

A metric counts its calls, keeps the value of the last one, and averages what it is given: updated
for each micro-batch, an average of losses would depend on the split. Invariant: while the parts of
a batch run, no metric of the module changes; then each is called as often as one part called it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from tenure._containers import tensors_in
from tenure._errors import AdaptiveUsageError

from .._joined import Joiner, detached

T = TypeVar("T")
_METHODS = ("forward", "update", "compute", "reset")
"""Those of a metric that do something else while parts run."""
_CONTAINERS = (dict, list, tuple)
# more items are data, which would be read in each step
_MAX_ITEMS = 256


@dataclass(frozen=True, slots=True)
class MetricCall:
    """One call of a metric.

    Attributes:
        name: the metric's name in its module, and the method.
        function: what calls it.
        args: by position, without graphs.
        kwargs: by name.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MetricRecorder:
    """Keeps the calls of metrics."""

    def __init__(self) -> None:
        # by identity: the hash of a metric changes with its state
        self._stand_ins: dict[int, Any] = {}

    def recording(
        self, metrics: Mapping[str, Any], calls: list[MetricCall], work: Callable[[], T]
    ) -> T:
        """Run work in which metrics, by name, are not called, but their calls noted."""
        for metric in metrics.values():
            if id(metric) not in self._stand_ins:
                self._stand_ins[id(metric)] = _empty_copy(metric)
        before = [(metric, dict(vars(metric))) for metric in metrics.values()]
        # as DeferredGradients.making()
        try:
            for name, metric in metrics.items():
                vars(metric).update(self._recording_methods(name, metric, calls))
            return work()
        finally:
            try:
                _bring_back(before)
            except KeyboardInterrupt:
                _bring_back(before)
                raise

    def _recording_methods(
        self, name: str, metric: Any, calls: list[MetricCall]
    ) -> dict[str, Callable[..., Any]]:
        stand_in = self._stand_ins[id(metric)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(MetricCall(name, metric, detached(args), detached(kwargs)))
            # the value that this part alone has
            stand_in.reset()
            return stand_in.forward(*args, **kwargs)

        def update(*args: Any, **kwargs: Any) -> None:
            calls.append(
                MetricCall(
                    f"{name}.update",
                    # its own again by then; now this is what it finds under that name
                    lambda *a, **k: metric.update(*a, **k),
                    detached(args),
                    detached(kwargs),
                )
            )

        def refused(*args: Any, **kwargs: Any) -> None:
            raise AdaptiveUsageError(
                f"compute() or reset() of the metric {name!r} was called in a training_step that "
                "runs in micro-batches, where the metric gets its numbers at the end, once for the "
                f"whole batch. Log the metric itself, self.log({name!r}, self.{name}), or call "
                "these in on_train_batch_end() or later."
            )

        return {"forward": forward, "update": update, "compute": refused, "reset": refused}


def _bring_back(before: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    for metric, space in before:
        for method in _METHODS:
            vars(metric).pop(method, None)
        vars(metric).update({m: space[m] for m in _METHODS if m in space})


def joined_call(calls: Sequence[MetricCall], joiner: Joiner, name: str) -> Callable[[], Any]:
    """Return a call of a metric with the joined arguments of its calls for each part."""
    first, place = calls[0], _place_of(calls[0], name)
    args = joiner.joined([call.args for call in calls], place)
    kwargs = joiner.joined([call.kwargs for call in calls], place)
    return functools.partial(first.function, *args, **kwargs)


def learn_call(calls: Sequence[MetricCall], whole: MetricCall, joiner: Joiner, name: str) -> None:
    """Find out how numbers that a metric gets add up, by a call with a few samples in one piece."""
    place = _place_of(whole, name)
    joiner.learn([call.args for call in calls], whole.args, place)
    joiner.learn([call.kwargs for call in calls], whole.kwargs, place)


def _place_of(call: MetricCall, name: str) -> str:
    return f"what {name}() gave the metric {call.name!r}"


def metrics_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of a module by name; of those inside another one, only the outer one."""
    # without it there are none
    library = sys.modules.get("torchmetrics")
    kinds = () if library is None else (library.Metric, library.MetricCollection)
    waiting: list[tuple[str, Any]] = [*_held_by(module)]
    seen: set[int] = set()
    while waiting:
        name, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, kinds):
            yield name, held
        else:
            waiting += [(f"{name}.{below}", each) for below, each in _held_by(held)]


def _held_by(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the children of a module and its attributes, or the items of a short container."""
    if isinstance(node, nn.Module):
        yield from node.named_children()
        # a plain list or dict of metrics is no child
        attributes = vars(node).items()
        yield from [(k, v) for k, v in attributes if k != "_modules" and isinstance(v, _CONTAINERS)]
    elif isinstance(node, _CONTAINERS) and len(node) <= _MAX_ITEMS:
        yield from node.items() if isinstance(node, dict) else enumerate(node)


def _empty_copy(metric: Any) -> Any:
    """Return a metric that has seen nothing."""
    # what it has seen may be all outputs of an epoch, and is not copied only to be dropped
    kept = tensors_in(vars(each) for each in metric.modules())
    made = copy.deepcopy(metric, {id(tensor): tensor for tensor in kept})
    made.reset()
    return made
