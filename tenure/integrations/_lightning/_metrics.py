"""Metrics in a `training_step`: called once for the whole batch, with what its parts gave them.

A metric counts its calls, keeps the value of the last one, and averages what it is given: updated
for each micro-batch, an average of losses would depend on the split. Invariant: while the parts of
a batch run, no metric changes, however the step found it; then each is called as often as one part
called it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from torch import nn

from tenure._containers import tensors_in
from tenure._errors import AdaptiveUsageError
from tenure._torch.patches import Patch

from .._joined import StepEvent, detached

T = TypeVar("T")
V = TypeVar("V")
_DID = {
    **dict.fromkeys(("compute", "reset"), "compute() or reset() of the metric {!r} was called"),
    "merge_state": "merge_state() of the metric {!r} was called",
    # each update of a metric reads it
    "_update_count": "The metric {!r} was updated by a method that was kept from before, or asked "
    "how often it was updated,",
}
"""What the program did that read an attribute; else it read a state, or that for copies."""
_METHODS = ("forward", "update", *_DID, "__getstate__")
"""The attributes of a metric that do something else while parts run, as its states do."""
_listening: ContextVar[MetricRecorder | None] = ContextVar("_listening", default=None)
_outside: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The metrics that no module holds, by the name by which it is known how their numbers add up."""


class MetricRecorder:
    """Keeps the calls of metrics.

    Args:
        module: the one whose step runs; it names them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # by identity: the hash of a metric changes with its state
        self._told: dict[int, Any] = {}
        self._names: dict[int, tuple[Any, str]] = {}
        self._stand_ins: dict[int, Any] = {}
        # made by what runs now, and by what ran before it
        self._made: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._kept: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._calls: list[StepEvent] | None = None

    def run(self, calls: list[StepEvent] | None, work: Callable[[], T]) -> T:
        """Run work in which metrics are not called, but their calls noted.

        Args:
            calls: gets them, each with its arguments by position and by name, and what calls the
                metric; None: they are called, and `step` notes each before it changes.
            work: what runs.
        """
        self._calls = calls
        self._kept.update(self._made)
        self._made.clear()
        with ExitStack() as stack:
            for kind in _kinds():
                stack.enter_context(_patch_of(kind).block())
            return run_with(_listening, self, work)

    def attribute(self, metric: Any, name: str, read: Callable[[Any, str], Any]) -> Any:
        """Return what the program gets as an attribute of a metric."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        # the hash of a metric, for one
        if name not in _METHODS and caller.startswith("torchmetrics."):
            return read(metric, name)
        collection = sys.modules["torchmetrics"].MetricCollection
        members = list(metric.children()) if isinstance(metric, collection) else [metric]
        for each in members:
            # as its __init__() and __setstate__() find it, before they wrap its methods
            if "update" not in vars(each):
                self._made[id(each)] = each
            if id(each) in self._kept:
                raise _refused(self._name_of(metric), "__init__")
        if not [each for each in members if id(each) not in self._made]:
            return read(metric, name)
        if self._calls is None:
            if id(metric) not in self._told:
                self._told[id(metric)] = metric
                _tell(metric)
            return read(metric, name)
        # its items() share states; its update(), if it was kept, has a count read elsewhere
        if caller == collection.__module__:
            return read(metric, name)
        if name == "forward":
            return functools.partial(self._forward, metric)
        if name == "update":
            return functools.partial(self._note, metric, ".update", read(metric, name))
        raise _refused(self._name_of(metric), name)

    def _forward(self, metric: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(metric, "", metric, *args, **kwargs)

        def alone() -> Any:
            stand_in = self._stand_ins.get(id(metric))
            if stand_in is None:
                stand_in = self._stand_ins[id(metric)] = _empty_copy(metric)
            stand_in.reset()
            return stand_in.forward(*args, **kwargs)

        # the value that this part alone has
        return run_with(_listening, None, alone)

    def _note(
        self, metric: Any, method: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        assert self._calls is not None
        given = detached(dict(enumerate(args)) | kwargs)
        self._calls.append(StepEvent("metric", self._name_of(metric) + method, given, function))

    def _name_of(self, metric: Any) -> str:
        """Return its name in the module, else one by its class that it keeps."""
        if id(metric) not in self._names:
            # no generators: in them, Python drops Ctrl-C
            known = [*self._module.named_modules(), *_outside.items()]
            names = [name for name, each in known if each is metric]
            self._names[id(metric)] = metric, names[0] if names else _new_name(metric)
        return self._names[id(metric)][1]


def _new_name(metric: Any) -> str:
    kind, number = type(metric).__name__, 1
    while f"{kind} {number}" in _outside:
        number += 1
    _outside[f"{kind} {number}"] = metric
    return f"{kind} {number}"


def _refused(name: str, attribute: str) -> AdaptiveUsageError:
    if attribute == "__init__":
        return AdaptiveUsageError(
            f"The metric {name!r} was made in a training_step and kept, and its batch runs several "
            "times, such as in micro-batches. Make it in __init__() of the module."
        )
    did = _DID.get(attribute, "The metric {!r} was copied, or its state was read,")
    return AdaptiveUsageError(
        f"{did.format(name)} in a training_step that runs in micro-batches, where the metric gets "
        "its numbers at the end, once for the whole batch. Log the metric itself, "
        f"self.log({name!r}, metric), or call these in on_train_batch_end() or later."
    )


def run_with(variable: ContextVar[V], value: V, work: Callable[[], T]) -> T:
    """Run work while a context variable has a value, and return what it returns."""
    before = variable.get()
    # no context manager: Ctrl-C may come as its end begins, and the value would stay for good
    try:
        variable.set(value)
        return work()
    finally:
        variable.set(before)


def _kinds() -> list[type]:
    # without it there are none
    library = sys.modules.get("torchmetrics")
    roots = () if library is None else (library.Metric, library.MetricCollection)
    kinds = list(roots)
    for kind in kinds:
        kinds += kind.__subclasses__()
    # a subclass with a __getattribute__ of its own need not ask that of its base
    return [kind for kind in kinds if kind in roots or "__getattribute__" in vars(kind)]


@functools.cache
def _patch_of(kind: type) -> Patch:
    """Return what shows recorders who reads which attribute of a metric.

    A search would miss the metrics that a global or an object of the program's own holds.
    """

    def listening(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def unheard(metric: Any, name: str) -> Any:
            # it may ask the one of a base, too
            return run_with(_listening, None, functools.partial(read, metric, name))

        def __getattribute__(metric: Any, name: str) -> Any:
            recorder = _listening.get()
            if recorder is not None and (name in _METHODS or name in _states_of(metric)):
                return recorder.attribute(metric, name, unheard)
            patch.was_called()
            return read(metric, name)

        return __getattribute__

    patch = Patch(kind, {"__getattribute__": listening}, lingers=True)
    return patch


def _states_of(metric: Any) -> Collection[str]:
    # as object has it: a metric that is asked would ask here again
    known: Collection[str] = object.__getattribute__(metric, "__dict__").get("_defaults", ())
    return known


def _tell(metric: Any) -> None:
    """Have `step` note a metric before it changes: modules that are called are seen, with these."""
    holder = nn.Identity()
    holder.metric = metric
    holder(None)


def call_metric(event: StepEvent) -> None:
    """Call a metric with the arguments that stand in an event."""
    by_position = [value for key, value in event.value.items() if isinstance(key, int)]
    named = {key: value for key, value in event.value.items() if isinstance(key, str)}
    event.how(*by_position, **named)


def _empty_copy(metric: Any) -> Any:
    """Return a metric that has seen nothing."""
    # what it has seen may be all outputs of an epoch, and is not copied only to be dropped
    kept = tensors_in(vars(each) for each in metric.modules())
    made = copy.deepcopy(metric, {id(tensor): tensor for tensor in kept})
    made.reset()
    return made
