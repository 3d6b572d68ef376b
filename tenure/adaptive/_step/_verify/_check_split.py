"""Is this loss one that can be split? Run a few samples whole and in parts, and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._show import steps
from tenure._torch.compiler import not_compiling

from ..._sizes import checked_size
from .._gradients import Scaler
from .._loss import Reduction
from .._modules import coupled_modules
from .._samples import SampleDims, SampleTree, cut_off
from .._split import StepParts, StepSpec
from ._compare import IT_IS_A_SUM, SplitDifference, SplitReport, relative_error
from ._observed import (
    LeafNames,
    default_rtol,
    differences,
    first_module,
    observed_run,
    without_dropout,
)

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
    length, except of 2 or 4 samples), and compares loss, terms, gradients and buffers. Dropout
    modules are off meanwhile. Gradients, buffers, random state and the modes of modules are as
    before afterwards.

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
    part = _first_samples(batch, in_dims, checked_size("n_samples", n_samples))
    parts = StepParts(dataclasses.replace(spec, batch=part))
    _check_number(parts)
    # unequal parts: where both are as long, a mean of means is the mean, and hides a wrong weight
    size = min(-(-parts.n_samples * 5 // 8), parts.n_samples - 1)
    # In no scope: a cache that the model fills meanwhile is the user's, and goes on being used.
    # Compiled code shows no modules, and would be compiled for each of the sizes and modes.
    with (
        not_compiling(),
        without_dropout(parts.roots),
        steps(f"check_split({parts.name})") as show,
    ):
        names: LeafNames = {}
        show("in one piece")
        whole = observed_run(parts, parts.n_samples, names=names)
        # where the whole does not agree with itself, no comparison with parts tells anything
        show("in one piece, with other random numbers")
        again = observed_run(parts, parts.n_samples, other_numbers=True, names=names)
        show("in two pieces")
        split = observed_run(parts, size, names=names)
        rtol = default_rtol(whole) if rtol is None else rtol
        sizes = split.outcome.sizes
        if by_chance := differences(whole, again, rtol, names):
            return SplitReport(sizes, rtol, (_random(parts, by_chance),))
        found = first_module(whole, split, rtol), differences(whole, split, rtol, names)
        different, advice = (*found[0], *found[1]), None
        # no weight goes with a sum
        if different and loss == "mean" and weight is None:
            show("in two pieces, as a sum")
            summed = StepParts(dataclasses.replace(spec, batch=part, loss="sum"))
            # a pair can't be a sum
            with suppress(AdaptiveUsageError):
                split = observed_run(summed, size, names=names)
                # a masked mean is a sum as well if one part alone has samples that count
                first = dataclasses.replace(spec, batch=_first_samples(part, in_dims, size))
                alone = observed_run(StepParts(first), size, names=names).outcome.loss
                counts_apart = relative_error(alone, whole.outcome.loss) > rtol and bool(alone)
                if counts_apart and not differences(whole, split, rtol, names):
                    advice = IT_IS_A_SUM
        return SplitReport(sizes, rtol, different, advice)


def _check_number(parts: StepParts) -> None:
    """Make sure that both parts have samples enough.

    Raises:
        AdaptiveUsageError: they don't.
    """
    fewest = 2 * parts.smallest
    if parts.n_samples < fewest:
        needs = f", 2 in each part for {coupled_modules(parts.roots)[0]}" if fewest > 2 else ""
        raise AdaptiveUsageError(
            f"check_split() got {parts.n_samples} sample(s), and a split needs {fewest} at "
            f"least{needs}."
        )


def _first_samples(batch: Any, in_dims: SampleDims, samples: int) -> Any:
    """Return the first samples without their graph, which can run backward only once."""
    tree = SampleTree(batch, in_dims, name="batch", argument="in_dims")
    n_samples = min(samples, tree.n_samples())
    return tree.with_leaves([cut_off(leaf.part(0, n_samples)) for leaf in tree.leaves])


def _random(parts: StepParts, found: list[SplitDifference]) -> SplitDifference:
    worst = max(difference.relative_error for difference in found)
    return SplitDifference("random", parts.name, worst)
