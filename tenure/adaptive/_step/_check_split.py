"""Is this loss one that can be split? Run a few samples whole and in parts, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure.scopes import NewDisposeScope

from .._callables import unused
from .._retry import Rollback, Together
from .._sizes import checked_size
from ._checks import checked_spec
from ._compare import largest_value, relative_error
from ._coupled import coupled_modules
from ._module_names import named_modules, named_parameters
from ._module_outputs import ModuleCall, first_difference, recorded
from ._optimizer_guard import no_optimizer_steps
from ._run import StepOutcome
from ._sample_tree import SampleDims, SampleTree
from ._setup import StepSetup
from ._split_backward import Scaler
from ._split_report import DifferenceKind, SplitDifference, SplitReport
from ._terms import ONLY, Reduction
from ._without_dropout import without_dropout

Batch = TypeVar("Batch")

_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE_RTOL = 5e-2
_FLOOR = 1e-3
"""A gradient so much smaller than the largest one is zero but for rounding."""


@dataclass(frozen=True, slots=True)
class _Result:
    """What one run left.

    Attributes:
        outcome: its losses, and the sizes it ran in.
        gradients: copies of those that it made, by the name of their leaf.
        buffers: copies of all of them by name, as the run left them.
        calls: what modules returned, those of all chunks one after the other.
    """

    outcome: StepOutcome
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: list[ModuleCall]


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
    samples: int = 8,
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
        samples: the most samples to use.
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
    spec = checked_spec("check_split", fn, loss, weight, then, once, "per_chunk", out_dims, scaler)
    part = _first_samples(batch, in_dims, checked_size("samples", samples))
    setup = StepSetup(spec, part, in_dims, model)
    _check_number(setup)
    size = min(-(-setup.n_samples * 5 // 8), setup.n_samples - 1)
    with NewDisposeScope("check_split"), without_dropout(setup.roots):
        whole = _result(setup, setup.n_samples)
        again = _result(setup, setup.n_samples, other_numbers=True)
        split = _result(setup, size)
        rtol = _default_rtol(whole) if rtol is None else rtol
        sizes = split.outcome.sizes
        if by_chance := _differences(whole, again, rtol):
            return SplitReport(sizes, rtol, (_random(setup, by_chance),))
        found = _first_module(whole, split, rtol), _differences(whole, split, rtol)
        return SplitReport(sizes, rtol, (*found[0], *found[1]))


def _check_number(setup: StepSetup) -> None:
    """Make sure that both parts have samples enough.

    Raises:
        AdaptiveUsageError: they don't.
    """
    fewest = 2 * setup.smallest
    if setup.n_samples < fewest:
        needs = f", 2 in each part for {coupled_modules(setup.roots)[0]}" if fewest > 2 else ""
        raise AdaptiveUsageError(
            f"check_split() got {setup.n_samples} sample(s), and a split needs {fewest} at "
            f"least{needs}."
        )


def _first_samples(batch: Any, in_dims: SampleDims, samples: int) -> Any:
    """The first samples, cut off the graph that they come of: it can run backward only once."""
    tree = SampleTree(batch, in_dims, name="batch", argument="in_dims")
    n_samples = min(samples, tree.n_samples())
    return tree.with_leaves([_cut_off(leaf.part(0, n_samples)) for leaf in tree.leaves])


def _cut_off(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


def _result(setup: StepSetup, size: int, *, other_numbers: bool = False) -> _Result:
    """Run the step at a size, note what it left, and take it back."""
    state: Rollback = Together((setup.state, setup.gradients))
    with recorded(setup.roots) as calls, no_optimizer_steps("check_split"):
        state.begin()
        try:
            if other_numbers:
                setup.rng.draw()
            outcome = setup.run.run(size)
            return _Result(outcome, _gradients(setup), _buffers(setup), calls)
        finally:
            state.undo()
            setup.state.finish()  # an error holds this frame, and must not hold copies


def _gradients(setup: StepSetup) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in named_parameters(setup.roots)}
    names |= setup.leaf_names
    found: dict[str, Tensor] = {}
    for leaf, gradient in setup.gradients.new():
        name = names.get(id(leaf), f"a tensor of shape {list(leaf.shape)}")
        found[unused(name, found)] = gradient.detach().clone()
    return found


def _buffers(setup: StepSetup) -> dict[str, Tensor]:
    return {
        f"{name}.{key} ({type(module).__name__})": buffer.detach().clone()
        for name, module in named_modules(setup.roots)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def _differences(whole: _Result, other: _Result, rtol: float) -> list[SplitDifference]:
    """What is off by more than ``rtol``: buffers, the loss and its terms, gradients, in order."""
    losses = {ONLY: whole.outcome.loss}, {ONLY: other.outcome.loss}
    terms = whole.outcome.terms, other.outcome.terms
    if len(terms[0]) == 1:
        terms = {}, {}
    return [
        *_off("buffer", whole.buffers, other.buffers, rtol),
        *_off("loss", *losses, rtol),
        *_off("term", *terms, rtol),
        *_off("gradient", whole.gradients, other.gradients, rtol),
    ]


def _off(
    kind: DifferenceKind, whole: dict[str, Tensor], other: dict[str, Tensor], rtol: float
) -> list[SplitDifference]:
    names = dict.fromkeys([*whole, *other])
    largest = max((largest_value(value) for value in whole.values()), default=0.0)
    floor = largest * _FLOOR if kind == "gradient" else 0.0
    errors = [(name, _error(whole.get(name), other.get(name), floor)) for name in names]
    return [SplitDifference(kind, name, error) for name, error in errors if not error <= rtol]


def _error(whole: Tensor | None, other: Tensor | None, floor: float) -> float:
    """How far off; a gradient that is not there counts as zeros."""
    if whole is None or other is None:
        there = whole if other is None else other
        return 0.0 if there is None or not bool(there.count_nonzero()) else float("inf")
    if whole.shape != other.shape:
        return float("inf")
    return relative_error(other, whole, floor)


def _first_module(whole: _Result, split: _Result, rtol: float) -> list[SplitDifference]:
    """The module that mixes samples, if one does; the last calls are those of the chunks."""
    n_calls, lengths = len(whole.calls), split.outcome.sizes
    chunks = [split.calls[i : i + n_calls] for i in range(0, len(split.calls), n_calls or 1)]
    found = first_difference(whole.calls, chunks[-len(lengths) :], lengths, rtol)
    if found is None:
        return []
    call, error = found
    return [SplitDifference("module", f"{call.name} ({call.kind})", error)]


def _random(setup: StepSetup, found: list[SplitDifference]) -> SplitDifference:
    worst = max(difference.relative_error for difference in found)
    return SplitDifference("random", setup.name, worst)


def _default_rtol(result: _Result) -> float:
    dtypes = {gradient.dtype for gradient in result.gradients.values()}
    dtypes |= {call.output.dtype for call in result.calls}  # under autocast less than those
    return max((_RTOL.get(dtype, _COARSE_RTOL) for dtype in dtypes), default=_COARSE_RTOL)
