"""Is this loss one that can be split? Run a few samples whole and in parts, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._show import steps
from tenure._torch.compiler import not_compiling

from ..._sizes import checked_size
from .._arguments import StepSpec
from .._gradients import Scaler
from .._loss import Reduction
from .._modules import coupled_modules
from .._parts import StepParts
from .._samples import SampleDims
from ._compare import CHECKED, SplitDifference, SplitReport
from ._declarations import declaration_for
from ._observed import Observed, differences, first_module
from ._subject import Subject

Batch = TypeVar("Batch")


def check_split(
    fn: Callable[[Batch], Any],
    batch: Batch,
    *,
    loss: Reduction | Callable[[Any], Tensor] = "mean",
    weight: Callable[[Batch], object] | None = None,
    then: Callable[..., Tensor] | None = None,
    once: Callable[[], Tensor] | None = None,
    model: nn.Module | Iterable[nn.Module] | None = None,
    scaler: Scaler | None = None,
    in_dims: SampleDims = 0,
    out_dims: SampleDims = 0,
    n_samples: int = 8,
    rtol: float | None = None,
) -> SplitReport:
    """Say whether `step` gives the same in micro-batches, and which module or parameter differs.

    Runs forward and backward on the first samples of the batch, in one piece and in two (of unequal
    length, except of 2 or 4 samples), and compares loss, terms, gradients and buffers. Random
    numbers of torch are constant meanwhile, and dropout keeps everything. Gradients, buffers and
    random state are as before afterwards.

    Args:
        fn: as for `step`, and so are ``batch`` and the arguments up to ``out_dims``.
        batch: as for `step`; at least 2 samples, or 4 where a module such as BatchNorm needs 2.
        loss: as for `step`.
        weight: as for `step`.
        then: as for `step`.
        once: as for `step`.
        model: as for `step`.
        scaler: as for `step`.
        in_dims: as for `step`.
        out_dims: as for `step`.
        n_samples: the most samples to use.
        rtol: the largest relative error that passes; by default 1e-9 for float64, 1e-4 for float32
            and 5e-2 for less.

    Raises:
        AdaptiveUsageError: as for `step`, or there are too few samples.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tenure.adaptive import check_split
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        >>> def loss_of(x):
        ...     return net(x).square().mean()
        >>> report = check_split(loss_of, torch.randn(8, 4, dtype=torch.float64))
        >>> report.ok, report.differences[0].name
        (False, 'net.1 (BatchNorm1d)')
    """
    spec = StepSpec(
        entry="check_split", fn=fn, batch=batch, loss=loss, weight=weight, then=then, once=once,
        model=model, batchnorm="per_chunk", scaler=scaler, in_dims=in_dims, out_dims=out_dims,
    )  # fmt: skip
    spec.check()
    parts = StepParts(spec)
    if parts.exchange.is_sharded:
        raise AdaptiveUsageError(
            "check_split() got a module of fully_shard, which rounds gradients as it exchanges "
            "them. Nothing was run. Call check_split() before fully_shard()."
        )
    n = min(checked_size("n_samples", n_samples), parts.n_samples)
    if n < (fewest := 2 * parts.smallest):
        needs = f", 2 in each part for {coupled_modules(parts.roots)[0]}" if fewest > 2 else ""
        raise AdaptiveUsageError(
            f"check_split() got {n} sample(s), and a split needs {fewest} at least{needs}."
        )
    # the first samples without their graph, which can run backward only once
    parts = Subject(parts, is_asked=True).parts_of(range(n))
    subject = Subject(parts, is_asked=True)

    def run(size: int) -> Observed:
        found = subject.observe([*range(n)], size, looks=True, watches=True)
        assert found is not None
        return found

    # In no scope: a cache that the model fills meanwhile is the user's, and goes on being used.
    # Compiled code shows no modules, and would be compiled for each of the sizes and modes.
    with not_compiling(), steps(f"check_split({parts.name})") as show:
        show("in one piece")
        whole = run(n)
        # unequal parts: where both are as long, a mean of means is the mean, and hides a wrong
        # weight
        show("in two pieces")
        split = run(min(-(-n * 5 // 8), n - 1))
        if rtol is None:
            rtol = CHECKED.of([*whole.tensors(), *(call.output for call in whole.calls)])
        found = differences(whole, split, rtol, subject.names)
        modules, advice = first_module(whole, split, rtol), None
        if found:
            # where the whole does not agree with itself, no comparison with parts tells anything
            show("in one piece again")
            by_chance = differences(whole, run(n), rtol, subject.names)
            if by_chance or subject.has_others:
                error = max(each.relative_error for each in by_chance or found)
                found, modules = [SplitDifference("random", parts.name, error)], []
            elif not modules:
                show("with other declarations")
                advice = declaration_for(subject, parts)
        return SplitReport(split.outcome.sizes, rtol, (*modules, *found), advice)
