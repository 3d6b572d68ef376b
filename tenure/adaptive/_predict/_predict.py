"""The peak of a piece of work: it runs once on tensors without data, and what it makes is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tenure._errors import AdaptiveUsageError
from tenure._torch.compiler import never_compiled

from .._callables import check_function
from ._advice_list import Adviser
from ._blocks import MemoryRecord, PeakMoment, replay
from ._observer import Operation, OperationPlace
from ._report import PeakReport
from ._work import Work


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
    record = observer.record
    peak = record.peak()
    operation = observer.operations[peak.operation] if peak.operation >= 0 else None
    later = record.of_a_later_step()
    records = [record] if later is None else [record, later]
    host = observer.offloaded
    on_host = [host, host.of_a_later_step() or host] if host.existing else []
    taken = [] if work.target.is_host else [replay(each) for each in records]
    reasons = work.reasons() | observer.reasons | observer.workspaces.reasons
    return PeakReport(
        peak_bytes=peak.n_bytes,
        baseline_bytes=record.baseline_bytes,
        categories=_categories(peak),
        phase=operation.phase if operation else "forward",
        operation=operation.name if operation else "",
        place=_described(operation, observer.operations, work.names),
        device=str(work.device),
        approximate=bool(reasons),
        reasons=(*reasons, *observer.workspaces.notes()),
        later_peak_bytes=None if later is None else later.peak().n_bytes,
        allocated_bytes=taken[0].allocated_peak if taken else None,
        reserved_bytes=taken[0].reserved_peak if taken else None,
        later_reserved_bytes=taken[1].reserved_peak if len(taken) > 1 else None,
        allowance_bytes=observer.workspaces.allowance_bytes if taken else 0,
        host_bytes=max((each.peak().n_bytes for each in on_host), default=None),
        _runs_within=(lambda limit: all(replay(each, limit).fits for each in records))
        if taken
        else None,
        _held_bytes=replay(MemoryRecord(record.existing)).reserved_peak if taken else None,
        _adviser=Adviser(work, peak.n_bytes, observer.has_backward),
    )


def _categories(peak: PeakMoment) -> dict[str, int]:
    """Return the bytes at the peak, by category."""
    categories: dict[str, int] = {}
    for block, n_bytes in peak.blocks.items():
        category = block.category
        if category is None:
            kept = block.phase == "forward" and block.outlived_forward
            category = "activations" if kept else "temporaries"
        categories[category] = categories.get(category, 0) + n_bytes
    return categories


def _described(
    operation: Operation | None, operations: Sequence[Operation], names: Mapping[int, str]
) -> str:
    """Return the module and the line, as ``encoder.layers.3 (train.py:12)``, or "".

    Args:
        operation: one of a backward pass belongs where its node was made.
        operations: all of them.
        names: of modules, by identity.
    """
    if operation is None:
        return ""
    place = operation.place or _made_at(operation.sequence, operations)
    if place is None:
        return ""
    module = None if place.module is None else place.module()
    name = "" if module is None else names.get(id(module), type(module).__name__)
    line = place.line()
    return f"{name} ({line})" if name and line else name or line


def _made_at(sequence: int, operations: Sequence[Operation]) -> OperationPlace | None:
    """Return the place of the operation whose node has a number: the next one that is above it."""
    above = [each for each in operations if each.place is not None and each.sequence > sequence]
    return min(above, key=lambda each: each.sequence).place if above else None
