"""A training step that fits: forward and backward in as few micro-batches as the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, Never, TypeVar

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._show import steps
from tenure._text import counted
from tenure._torch.compiler import never_compiled
from tenure.scopes import DisposeScope, is_disposed

from .._attempt import Attempts, OnRetry
from .._ranks import has_other_ranks, is_rank
from .._sizes import (
    AdaptiveSearch,
    BatchsizeCache,
    NoBatchsizeCache,
    RememberedCall,
    SizeLimits,
    calling_frame,
    checked_size,
    stands_for,
)
from .._undo import Caches
from ._across import PlannedRanks, StepRanks, taking_part
from ._arguments import BatchNormPolicy, StepSpec
from ._at_size import foresee
from ._gradients import Backward, Scaler
from ._loss import Reduction
from ._modules import no_optimizer_steps
from ._parts import StepParts
from ._samples import SampleDims
from ._split import StepOutcome, run_at, try_at
from ._verify import Verification

Batch = TypeVar("Batch")

_OUTPUTS_HAVE_TO_FIT = (
    "Not even 1 fits: loss= gets the outputs of the whole batch, so these and their gradients have "
    "to fit, together with one micro-batch, however small it is. Return smaller outputs, pass a "
    "smaller batch, or say the loss as a mean or a sum over samples."
)


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """The result of a step. The gradients are in the ``.grad`` of the parameters.

    Attributes:
        loss: the loss of the whole batch, of no dimension, to read: its gradients are there
            already, so it has no graph, and no ``backward()``; not scaled by a scaler.
        terms: its terms by the names that the function gave them; ``"loss"`` where it gave none.
        micro_batch: the most samples in a micro-batch; all of them if the batch was not split.
        sizes: samples in each micro-batch, in order.
        attempts: how often the step was begun; 1 if nothing ran out of memory.
        aux: with ``has_aux``, what the function returned beside its loss for each micro-batch, in
            order; nothing of attempts that failed.
        n_samples: the samples of the batch; on several ranks those of all, so that 0 says that
            every rank has come to its end.
    """

    loss: Tensor
    terms: Mapping[str, Tensor]
    micro_batch: int
    sizes: tuple[int, ...]
    attempts: int
    aux: tuple[Any, ...] = ()
    n_samples: int = 0

    def __repr__(self) -> str:
        # one line: a notebook shows the last one of each cell, and `aux` may be all of the outputs
        figures = f"{counted(self.n_samples, 'sample')}, micro-batch {self.micro_batch}"
        attempts = counted(self.attempts, "attempt")
        return f"<StepResult: loss {_in_short(self.loss)}, {figures}, {attempts}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with plain dicts, because a view of a dict can be neither."""
        values = self.loss, dict(self.terms), self.micro_batch, self.sizes, self.attempts
        return _with_terms_to_read, (*values, self.aux, self.n_samples)


def _in_short(loss: Tensor) -> str:
    if is_disposed(loss):
        return "disposed"
    try:
        return f"{loss.item():.4g}"
    except RuntimeError:
        return "without data"


def _with_terms_to_read(loss: Tensor, terms: dict[str, Tensor], *others: Any) -> StepResult:
    return StepResult(loss, MappingProxyType(terms), *others)


def _result(outcome: StepOutcome, n_begun: int, n_samples: int) -> StepResult:
    terms, sizes = MappingProxyType(outcome.terms), outcome.sizes
    micro_batch = max(sizes, default=0)
    return StepResult(outcome.loss, terms, micro_batch, sizes, n_begun, outcome.aux, n_samples)


@never_compiled
def step(
    fn: Callable[[Batch], Any],
    batch: Batch | None,
    *others: Never,
    loss: Reduction | Callable[[Any], Tensor] = "mean",
    weight: Callable[[Batch], object] | None = None,
    then: Callable[..., Tensor] | None = None,
    once: Callable[[], Tensor] | None = None,
    model: nn.Module | Iterable[nn.Module] | None = None,
    batchnorm: BatchNormPolicy = "refuse",
    scaler: Scaler | None = None,
    backward: Backward | None = None,
    in_dims: SampleDims = 0,
    out_dims: SampleDims = 0,
    minimum: int = 1,
    maximum: int | None = None,
    cache_type: type[BatchsizeCache] | None = None,
    context: Hashable | None = None,
    on_retry: OnRetry | None = None,
    verify: bool = True,
    predict: bool = False,
    has_aux: bool = False,
    group: Any = None,
    per_rank: bool = False,
) -> StepResult:
    """Run forward and backward, and split the batch if it does not fit.

    The step begins with the whole batch, as plain PyTorch would, or with the size that worked last
    time. If memory runs out, it undoes the attempt (tensors, gradients, buffers, random state), and
    runs smaller micro-batches. The gradients match the whole batch up to rounding. If memory can be
    measured, it first runs two micro-batches and undoes them, to see how large they may be. Call
    the optimizer after ``step``.

    All ranks of a ``DistributedDataParallel``, or of ``group``, make a step together. Each splits
    its own batch. All get the gradients of all samples, or all get an error.

    Args:
        fn: gets the batch or a part of it, in the same structure, and returns its loss: a mean or
            a sum (see ``loss``), a pair ``(sum, count)``, or a dict of these, whose values are the
            terms of the loss. With a callable ``loss`` it returns outputs, one for each sample.
            It may run several times, so it must not call ``backward``, ``zero_grad`` or an
            optimizer, and must not write into the batch or a parameter.
        batch: a tensor, or a container of plain values and tensors with one row for each sample.
            On several ranks, None for a rank without samples.
        others: not supported. Pass several values as one batch: ``step(fn, (x, y))``.
        loss: ``"mean"`` or ``"sum"`` over samples, whichever ``fn`` returns. Or a function that
            gets the outputs of the whole batch and returns its loss. A split step then runs ``fn``
            a second time for each micro-batch.
        weight: for a mean over something other than samples. It gets a micro-batch, and returns the
            divisor of its mean (the number of valid tokens, the sum of class weights). It should
            read labels, and run no model. For terms with different divisors, return pairs.
        then: a function of the mean or sum (or of the dict of terms) that returns the loss, such as
            ``torch.sqrt``.
        once: returns a term that is added once for the batch, such as a penalty on parameters.
        model: the modules that ``fn`` runs; None: they are found through ``fn``.
        batchnorm: used if the batch must be split and a module in training mode mixes samples.
            ``"refuse"`` raises an error; with ``"per_chunk"`` the module uses the statistics of
            each micro-batch.
        scaler: a ``torch.amp.GradScaler``, which scales the loss. It cannot be combined with
            ``backward``.
        backward: runs backward in place of ``loss.backward()``, such as ``accelerator.backward``.
            It gets the loss of a batch that fits. Of a split batch it gets a scalar for each
            micro-batch, and one more for the gradients that come from ``once``, ``then`` or a
            callable ``loss`` alone. It must call ``backward()`` on this scalar, or on a multiple of
            it by the same number each time. Clipping inside it is not noticed. It may run again;
            trials, verifications, `check_split` and `plan` run plain backward. With a callable
            ``loss``, return outputs in float32, because their gradients are computed before its
            factor is known.
        in_dims: the dimension of the samples in ``batch``; None for tensors that all samples share;
            ``"items"`` for a list with one item for each sample; or a container of these.
        out_dims: the dimension of the samples in outputs, which are tensors; or None.
        minimum: the fewest samples in a micro-batch.
        maximum: the most samples in a micro-batch. With ``batchnorm="per_chunk"``, a BatchNorm,
            micro-batches of 2 and an odd number of samples, the last one has 3.
        cache_type: the class that says what a size is remembered for; None: the current
            ``DEFAULT_CACHE_TYPE``.
        context: calls with the same context share sizes; None: the function and the line of the
            call.
        on_retry: called with each AdaptiveEvent.
        verify: compare a few samples, and the loss of the whole batch, with the results of
            micro-batches before any gradient is written: the first three times that a call splits,
            the 5th, the 10th, and so on. ``fn`` runs a few times more for it. False skips this, and
            does not fix gradients.
        predict: begin with the size that `predict_peak` says fits, if memory can be measured and no
            size is known. ``fn`` runs a few times more for it, on tensors without data. If nothing
            can be predicted, the step begins with the whole batch.
        has_aux: ``fn`` returns a pair of its loss and anything else, such as predictions, which the
            result has for each micro-batch. Detach it, or its graphs stay alive.
        group: the process group whose ranks make the step together, such as
            ``torch.distributed.group.WORLD``; None: the group of the ``DistributedDataParallel``
            that ``fn`` runs. Every rank of it must call ``step``.
        per_rank: on several ranks, True if the loss is each rank's own and gradients are averaged
            over ranks, as by DistributedDataParallel; False for one loss over all samples.

    Returns:
        The loss, and how the batch was split.

    Raises:
        OutOfRetriesError: micro-batches of ``minimum`` samples do not fit.
        BatchCoupledError: the batch must be split, and a module mixes its samples.
        SplitMismatchError: splitting the batch would change the loss or the gradients.
        RemoteRankError: another rank has failed, or did not come.
        AdaptiveUsageError: an argument, or the result of ``fn``, cannot be used. After each of
            these errors gradients, buffers and random state are as before.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import step
        >>> model = nn.Linear(4, 1)
        >>> def loss_of(batch):
        ...     return nn.functional.mse_loss(model(batch["x"]), batch["y"])
        >>> batch = {"x": torch.randn(10, 4), "y": torch.randn(10, 1)}
        >>> step(loss_of, batch, maximum=4).sizes
        (4, 4, 2)
        >>> split = model.weight.grad.clone()
        >>> model.zero_grad()
        >>> loss_of(batch).backward()
        >>> torch.allclose(split, model.weight.grad)
        True
    """
    if others:
        raise AdaptiveUsageError(
            f"step() got {1 + len(others)} values beside the function, which gets one, the batch. "
            "Pass step(fn, (x, y)), and let fn take it apart: lambda batch: loss(model(batch[0]), "
            "batch[1])."
        )
    # first of all: here dynamo leaves a compiled caller
    frame = calling_frame()
    spec = StepSpec(
        entry="step", fn=fn, batch=batch, loss=loss, weight=weight, then=then, once=once,
        model=model, batchnorm=batchnorm, scaler=scaler, backward=backward,
        in_dims=in_dims, out_dims=out_dims, has_aux=has_aux,
    )  # fmt: skip
    options = StepOptions(
        minimum, maximum, cache_type, context, on_retry, verify, predict, group, per_rank
    )
    return run_step(spec, options, frame)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The arguments of `step` that say how to run it, and not what."""

    minimum: int = 1
    maximum: int | None = None
    cache_type: type[BatchsizeCache] | None = None
    context: Hashable | None = None
    on_retry: OnRetry | None = None
    verify: bool = True
    predict: bool = False
    group: Any = None
    per_rank: bool = False


def run_step(spec: StepSpec, options: StepOptions, frame: FrameType) -> StepResult:
    """Run a step; ``frame`` is where it was called, which sizes are remembered for."""
    others: AbstractContextManager[StepRanks | PlannedRanks | None] = nullcontext()
    if has_other_ranks():
        others = taking_part(spec, options.group, per_rank=options.per_rank)
    with others as ranks:
        # the end of a loop for several ranks, run on one
        if spec.batch is None and ranks is None and is_rank():
            nothing = torch.tensor(0.0 if spec.loss == "sum" else float("nan"))
            return _with_terms_to_read(nothing, {}, 0, (), 0)
        spec = spec if ranks is None else ranks.own_spec()
        spec.check()
        parts = StepParts(spec)
        if ranks is not None:
            ranks.begin(parts)
        # other ranks have samples, and this one has none to run
        is_idle = ranks is not None and not parts.n_samples
        search = _search(parts, options, frame, is_idle=is_idle)
        if isinstance(ranks, PlannedRanks):
            return _run_planned(parts, search, ranks)
        return _run(parts, options, search, ranks, is_idle=is_idle)


def _search(
    parts: StepParts, options: StepOptions, frame: FrameType, *, is_idle: bool
) -> AdaptiveSearch:
    """Return which sizes to try."""
    limits = SizeLimits(max(checked_size("minimum", options.minimum), parts.smallest))
    # of an empty batch, too
    largest = max(parts.n_samples, 1)
    if options.maximum is not None:
        most = checked_size("maximum", options.maximum)
        if most < limits.minimum:
            raise AdaptiveUsageError(
                f"maximum={options.maximum} is below {limits.minimum}, the fewest samples that a "
                'micro-batch may have here, by minimum= or by batchnorm="per_chunk". Raise it.'
            )
        largest = min(largest, most)
    cache_type = options.cache_type
    if is_idle:
        # its size means nothing and teaches nothing, and there is one less to try again with
        cache_type, largest = NoBatchsizeCache, limits.minimum + 1
    remembered = RememberedCall(
        stands_for(parts.spec.fn), frame, options.context, cache_type, parts.values, {},
        adds_gradients=parts.gradients.are_there_before,
    )  # fmt: skip
    return AdaptiveSearch(
        largest, limits, remembered, has_trials=not is_idle, n_samples=parts.n_samples
    )


def _run(
    parts: StepParts,
    options: StepOptions,
    search: AdaptiveSearch,
    ranks: StepRanks | None,
    *,
    is_idle: bool,
) -> StepResult:
    """Run it, with sizes that are smaller until one fits."""
    spec = parts.spec
    if options.predict and search.is_unknown and not is_idle:
        foresee(search, parts)
    verifier: Verification | None = None

    def attempt(size: int) -> StepOutcome:
        nonlocal verifier
        if ranks is not None:
            ranks.check_not_gone()
        # a failed attempt is taken back, and what an optimizer has moved can't be
        with no_optimizer_steps(spec.entry, needs=parts.backward.needs_gradient_of):
            # where sizes have failed and none is known to fit
            if search.is_trial:
                _try_out(parts, search, attempts)
            if is_idle:
                parts.begin(is_split=False)
            # one for all attempts of this call
            if options.verify and verifier is None and search.size < parts.n_samples:
                verifier = Verification(parts)
            outcome = None if is_idle else run_at(parts, search.size, verifier)
            parts.inputs.check_rewritten()
            if ranks is not None:
                return ranks.agree(outcome)
            assert outcome is not None
            # they are the user's: Ctrl-C may end them, and not what delivers gradients then
            parts.gradients.run_hooks()
            return outcome

    with DisposeScope(spec.entry) as scope:
        attempts = Attempts(
            parts.name,
            scope,
            unit="micro-batch",
            state=parts.rollback(),
            on_retry=options.on_retry,
            advice=_OUTPUTS_HAVE_TO_FIT if callable(spec.loss) else None,
        )
        try:
            outcome = attempts.run(search, attempt)
        except BaseException:
            # it holds this frame, and must not hold copies
            parts.state.finish()
            raise
    search.finished()
    n_samples = parts.n_samples if ranks is None else ranks.n_samples
    return _result(outcome, attempts.n_begun, n_samples)


def _try_out(parts: StepParts, search: AdaptiveSearch, attempts: Attempts) -> None:
    """Run parts and take them back, until the size is known."""
    with steps(f"step({parts.name})") as show:
        while search.is_trial:
            show(f"a trial of micro-batch {search.size}")
            caches = Caches(parts.reached)
            try_at(parts, search.size)
            attempts.take_back(caches)
            parts.gradients.begin()
            search.tried()


def _run_planned(parts: StepParts, search: AdaptiveSearch, ranks: PlannedRanks) -> StepResult:
    """Run it once, with what all ranks agree on.

    Nothing is verified: that runs parts of its own, which other ranks would have to run as well.
    """
    told = "its size was not predicted"
    search.stay()
    if search.is_unknown:
        foreseen = foresee(search, parts)
        told = foreseen.told(search.size) or "its size could not be predicted"
        if foreseen.has_failed:
            # or each call would ask again
            search.remember()
    ranks.plan(search)
    entry = parts.spec.entry
    with DisposeScope(entry) as scope, no_optimizer_steps(entry):
        outcome = ranks.run(search, lambda size: run_at(parts, size), told)
        if made := scope.owned():
            scope.move_to_outer(made)
    return _result(outcome, 1, ranks.n_samples)
