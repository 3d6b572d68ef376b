"""The peak of a piece of work: it runs once on tensors without data, and what it makes is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tenure._errors import AdaptiveUsageError
from tenure._torch.compiler import never_compiled

from .._callables import check_function
from .._memory import counting_on, meter_for
from ._blocks import MemoryRecord, replay
from ._observer import Operation
from ._report import Advice, Adviser, PeakReport
from ._work import Work

_logger = logging.getLogger("tenure.adaptive")
_Advise = Callable[[Work, int, bool], tuple[Advice, ...]]
_advise: list[_Advise] = []


def advise_with(function: _Advise) -> None:
    """Have a function asked for advice; it knows more of the library than a prediction may.

    Args:
        function: gets the work, its peak in bytes, and whether it has a backward pass.
    """
    _advise[:] = [function]


@never_compiled
def predict_peak(
    fn: Callable[..., Any],
    *args: Any,
    optimizer: Optimizer | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> PeakReport:
    """Predict the peak memory of work without running it.

    ``fn`` runs once on tensors without data, then the backward pass of its result, then a step of
    the optimizer. Every storage on the device counts while it is alive: existing weights,
    gradients, optimizer state and arguments, and the tensors that the work creates. On the CPU,
    memory that kernels use counts too. For an accelerator the report also has the bytes that its
    caching allocator reserves, and an allowance for kernels.

    Afterwards the model, its gradients and buffers, the optimizer, the random numbers, and the
    lists and dicts that ``fn`` names are as before, and no cache holds a tensor without data.
    Prints and other side effects have happened; so have changes of torch's settings.

    Args:
        fn: the work. If it returns a loss, terms of one, or other tensors that require grad, they
            run backward; of an object with a tensor as ``loss``, that tensor does. Nothing else
            runs backward: under ``torch.no_grad()`` it is inference.
        *args: arguments of ``fn``: tensors of any shape, dtype and device, in containers of any
            kind. A tensor on ``meta`` counts as one on the device, and may be larger than memory.
        optimizer: its step counts too, with the state that it creates; None: no step.
        device: the device whose memory counts; None: the device of the first tensor with data among
            the weights and the arguments. It need not be present on this machine.
        **kwargs: keyword arguments of ``fn``.

    Returns:
        The peak, with its phase, line and categories. ``fits`` compares it with a budget, and
        ``advice`` lists changes that lower it. It is ``approximate`` if something was assumed.

    Raises:
        PredictionError: the work reads values outside of torch's operations, uses a tensor of its
            own class, or is on accelerators of another kind. Or an object keeps a tensor without
            data, which the error names: remove it there.
        AdaptiveUsageError: ``fn`` is no function that runs from its call to its return, or
            ``optimizer`` is no optimizer.
        Exception: any error of ``fn``.

    Note:
        Meanwhile the tensors that the work uses have no data, also for other threads. Predict while
        no other thread uses the model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import predict_peak
        >>> model = nn.Linear(1024, 1024)
        >>> batch = torch.empty(2**18, 1024, device="meta")
        >>> report = predict_peak(lambda x: model(x).square().mean(), batch)
        >>> report.phase, report.fits("24GiB"), model.weight.grad is None
        ('backward', True, True)
    """
    check_function("predict_peak()", fn)
    if not isinstance(optimizer, Optimizer | None):
        raise AdaptiveUsageError(
            f"predict_peak() got a {type(optimizer).__name__} as optimizer=. Pass the "
            "torch.optim.Optimizer whose first step counts, or None."
        )
    work = Work(fn, args, kwargs, optimizer, device)
    return report_of(work)


def report_of(work: Work, *, is_counted: bool = False) -> PeakReport:
    """Run the work on tensors without data, and tell what it takes.

    Args:
        work: what runs.
        is_counted: whether to tell what a memory budget counts, rather than what there is.
    """
    observer = work.observe(is_counted=is_counted)
    # the report keeps these, and nothing else of the observer
    record, workspaces, has_backward = observer.record, observer.workspaces, observer.has_backward
    peak_bytes, at = record.peak()
    operation = observer.operations[record.events[at].operation] if at >= 0 else None
    later = record.of_a_later_step()
    records = [record] if later is None else [record, later]
    host = observer.offloaded
    on_host = [host, host.of_a_later_step() or host] if host.existing or host.events else []
    taken = [] if work.target.is_host else [replay(each) for each in records]
    reasons = dict.fromkeys([*work.reasons(), *observer.reasons, *workspaces.reasons])
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def ask() -> tuple[Advice, ...]:
        # as it was where the work was predicted
        with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
            return tuple(each for find in _advise for each in find(work, peak_bytes, has_backward))

    return PeakReport(
        peak_bytes=peak_bytes,
        baseline_bytes=record.baseline_bytes,
        categories=record.categories(at),
        phase=operation.phase if operation else "forward",
        operation=operation.name if operation else "",
        place=_described(operation, observer.operations, work.names),
        device=str(work.device),
        approximate=bool(reasons),
        reasons=(*reasons, *workspaces.notes()),
        later_peak_bytes=None if later is None else later.peak()[0],
        allocated_bytes=taken[0][0] if taken else None,
        reserved_bytes=taken[0][1] if taken else None,
        later_reserved_bytes=taken[1][1] if len(taken) > 1 else None,
        allowance_bytes=workspaces.allowance_bytes if taken else 0,
        host_bytes=max((each.peak()[0] for each in on_host), default=None),
        _records=tuple(records) if taken else (),
        _adviser=Adviser(ask=ask),
    )


def _described(
    operation: Operation | None, operations: list[Operation], names: dict[int, str]
) -> str:
    """Return the module and the line, as ``encoder.layers.3 (train.py:12)``, or "".

    Args:
        operation: one of a backward pass belongs where its node was made.
        operations: all of them.
        names: of modules, by identity.
    """
    if operation is None:
        return ""
    place = operation.place
    if place is None:
        # the node was made by the next operation that has a higher number
        sequence = operation.sequence
        above = [each for each in operations if each.place and each.sequence > sequence]
        place = min(above, key=lambda each: each.sequence).place if above else None
    if place is None:
        return ""
    module = None if place.module is None else place.module()
    name = "" if module is None else names.get(id(module), type(module).__name__)
    # `tenure fit` steps the optimizer itself, which is no line of the program
    line = "" if place.site is None or place.site.is_own else str(place.site)
    return f"{name} ({line})" if name and line else name or line


class Forecast:
    """The bytes that sizes of a piece of work need beside what is there.

    Whatever goes wrong in a prediction, no error leaves it, unless a tensor without data is left in
    a cache; and an optimizer has stepped nothing: its state would be that of such tensors.

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
    reserved_bytes = report.reserved_bytes
    if reserved_bytes is None or meter is None or not meter.is_in_segments:
        return max(0, report.peak_bytes - report.baseline_bytes)
    _, held_bytes, _ = replay(MemoryRecord(report._records[0].existing))
    needed_bytes = max(0, reserved_bytes - held_bytes) + report.allowance_bytes
    # an allocator that is short of memory gives back what it caches, and may need no more then
    free_bytes = meter.available_bytes()
    if needed_bytes > free_bytes and report.fits(held_bytes + free_bytes):
        return free_bytes
    return needed_bytes
