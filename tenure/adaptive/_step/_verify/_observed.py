"""A step that is run to be looked at: what it left is noted and taken back; and two compared.

The one home of what `check_split` and the verification of `step` call the same. Of each module is
noted what it returned, to find the first that mixes the samples of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._torch.modules import Dropout
from tenure._torch.quiet import without_functions

from ..._callables import unused
from ..._reachable import named_modules, named_parameters
from ..._undo import AllOf, Rollback
from .._loss import ONLY
from .._modules import no_optimizer_steps
from .._split import StepOutcome, StepParts, StepRun
from ._compare import (
    CHECKED,
    GRADIENT_FLOOR,
    DifferenceKind,
    SplitDifference,
    largest_value,
    relative_error,
)

LeafNames = dict[int, tuple[Tensor, str]]
"""Leaves without a name by identity, kept so that it stays theirs, and what they are called."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What one run left.

    Attributes:
        outcome: its losses, and the sizes it ran in.
        gradients: copies of those that it made, by the name of their leaf.
        buffers: copies of all of them by name, as the run left them; none unless watched.
        calls: what modules returned, those of all chunks one after the other; likewise.
        draws: whether random numbers were drawn, and whether others than torch's; only if asked.
    """

    outcome: StepOutcome
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: list[ModuleCall]
    draws: tuple[bool, bool]

    def tensors(self) -> list[Tensor]:
        """Yield all that rounding may have changed: a float64 model may have a loss in float32."""
        outcome = self.outcome
        return [*self.gradients.values(), outcome.loss, *outcome.terms.values()]


def observed_run(
    parts: StepParts,
    size: int,
    *,
    watch: bool = True,
    asks: bool = True,
    other_numbers: bool = False,
    names: LeafNames,
) -> Observed:
    """Run the step at a size, note what it left, and take it back.

    Args:
        parts: the step.
        size: the samples of a micro-batch.
        watch: look at buffers and at what modules return too; their copies take memory.
        asks: refuse to write a parameter before it is written, and see what numbers are drawn.
        other_numbers: let it draw other random numbers.
        names: what leaves without a name are called, in other runs too; gets new ones.
    """
    state: Rollback = AllOf((parts.state, parts.gradients))
    parts.is_asked = asks
    watched: AbstractContextManager[list[ModuleCall]]
    watched = _recorded(parts.roots) if watch else nullcontext([])
    # other processes know nothing of a run that is taken back
    with parts.without_exchange(), watched as calls, no_optimizer_steps(parts.spec.entry):
        state.begin()
        try:
            if other_numbers:
                parts.state.rng.draw()
            # no hook of the user's sees a gradient that is thrown away
            leaves = [leaf for leaf in parts.gradients.leaves() if leaf.requires_grad]
            parts.backward.let_hooks_wait(leaves)
            outcome = StepRun(parts).run(size)
            rng = parts.state.rng
            with without_functions():
                return Observed(
                    outcome,
                    _gradients(parts, names),
                    buffers_of(parts) if watch else {},
                    calls,
                    (rng.has_drawn(), rng.has_drawn(elsewhere=True)) if asks else (False, False),
                )
        finally:
            state.undo()
            # where the function let the batch require grad, the next run is to find it without
            parts.inputs.undo()
            # an error holds this frame, and must not hold copies
            parts.state.finish()


def _gradients(parts: StepParts, nameless: LeafNames) -> dict[str, Tensor]:
    """Copy the gradients that a run made, by name.

    Args:
        parts: the step.
        nameless: what leaves are called that were not known before they were used, which come in no
            order, or are others in each run; gets new ones.
    """
    # those that were known before anything ran are the same in each run
    names = _parameter_names(parts.models.found) | parts.leaf_names
    seen = _parameter_names(parts.roots)
    found: dict[str, Tensor] = {}
    for leaf, gradient in parts.gradients.new():
        name = names.get(id(leaf))
        if name is None:
            if id(leaf) not in nameless:
                known = [other for _, other in nameless.values()]
                called = seen.get(id(leaf), f"a tensor of shape {list(leaf.shape)}")
                nameless[id(leaf)] = leaf, unused(called, known)
            name = nameless[id(leaf)][1]
        # those of two runs need not fit on a device
        found[unused(name, found)] = gradient.detach().cpu()
    return found


def _parameter_names(roots: dict[str, nn.Module]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in named_parameters(roots)}


def buffers_of(parts: StepParts) -> dict[str, Tensor]:
    """Copy the buffers as they are, by name."""
    return {
        f"{name}.{key} ({type(module).__name__})": buffer.detach().clone()
        for name, module in named_modules(parts.roots)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def differences(
    whole: Observed, other: Observed, rtol: float, nameless: LeafNames
) -> list[SplitDifference]:
    """Return the differences above ``rtol``: buffers, the loss and its terms, gradients.

    Args:
        whole: a run.
        other: another one.
        rtol: what may be off.
        nameless: leaves without a name, of both runs. What only one of them has was made by the
            function itself, and nobody sees its gradient.
    """
    losses = {ONLY: whole.outcome.loss}, {ONLY: other.outcome.loss}
    terms = whole.outcome.terms, other.outcome.terms
    # a single term is the loss, and would be told twice
    if len(terms[0]) == 1:
        terms = {}, {}
    own = {name for _, name in nameless.values()} & (
        whole.gradients.keys() ^ other.gradients.keys()
    )
    one, two = (
        {name: value for name, value in each.gradients.items() if name not in own}
        for each in (whole, other)
    )
    return [
        *_off("buffer", whole.buffers, other.buffers, rtol),
        *_off("loss", *losses, rtol),
        *_off("term", *terms, rtol),
        *_off("gradient", one, two, rtol),
    ]


def _off(
    kind: DifferenceKind, whole: dict[str, Tensor], other: dict[str, Tensor], rtol: float
) -> list[SplitDifference]:
    names = dict.fromkeys([*whole, *other])
    largest = max((largest_value(value) for value in whole.values()), default=0.0)
    # such as that of a bias before a normalization, which is rounding alone
    floor = largest * GRADIENT_FLOOR if kind == "gradient" else 0.0
    errors = [(name, _error(whole.get(name), other.get(name), floor)) for name in names]
    return [SplitDifference(kind, name, error) for name, error in errors if not error <= rtol]


def _error(whole: Tensor | None, other: Tensor | None, floor: float) -> float:
    """Return how far off; a gradient that is not there counts as zeros."""
    if whole is None or other is None:
        there = whole if other is None else other
        return 0.0 if there is None or not bool(there.count_nonzero()) else float("inf")
    if whole.shape != other.shape:
        return float("inf")
    return relative_error(other, whole, floor)


def first_module(whole: Observed, split: Observed, rtol: float) -> list[SplitDifference]:
    """Return the module that mixes samples, if one does; the last calls are those of the chunks."""
    found = [
        (call, error)
        for call, error, is_mixed in _differing_calls(whole, split, rtol)
        if not is_mixed
    ][:1]
    return [SplitDifference("module", f"{call.name} ({call.kind})", error) for call, error in found]


def mixed_input(whole: Observed, split: Observed, rtol: float) -> str:
    """Return the first module that gets samples which are mixed already; "" for none."""
    found = [call for call, _, is_mixed in _differing_calls(whole, split, rtol) if is_mixed]
    return f"{found[0].name} ({found[0].kind})" if found else ""


def default_rtol(result: Observed) -> float:
    """Return the relative error that rounding explains, by the types of all that the run gave."""
    # under autocast modules return coarser types than gradients have
    return CHECKED.of([*result.tensors(), *(call.output for call in result.calls)])


@contextmanager
def without_dropout(roots: Mapping[str, nn.Module]) -> Iterator[bool]:
    """Turn dropout off in modules, and back on at the end of the block; whether any was on."""
    modules = [module for _, module in named_modules(roots)]
    training = [m for m in modules if isinstance(m, Dropout | nn.RReLU) and m.training]
    # these draw inside of one operation, by a rate of their own, and their mode means more
    rated: list[Any] = [m for m in modules if isinstance(m, nn.MultiheadAttention | nn.RNNBase)]
    rates = [each.dropout for each in rated]
    try:
        for module in training:
            module.training = False
        for each in rated:
            each.dropout = 0.0
        is_on = any(each.training and rate for each, rate in zip(rated, rates, strict=True))
        yield bool(training) or is_on
    finally:
        for module in training:
            module.training = True
        for each, rate in zip(rated, rates, strict=True):
            each.dropout = rate


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
        name: the module, as its root and its path below that.
        kind: its type.
        given: a copy of the first tensor that it got; None for none.
        output: a copy of the first tensor of floating point that it returned.
    """

    name: str
    kind: str
    given: Tensor | None
    output: Tensor


@contextmanager
def _recorded(roots: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Note each call of each module in the block, innermost first."""
    calls: list[ModuleCall] = []
    handles = []
    for name, module in named_modules(roots):
        before, after = _recorders(name, calls)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _differing_calls(
    whole: Observed, split: Observed, rtol: float
) -> Iterator[tuple[ModuleCall, float, bool]]:
    """Yield the calls whose outputs for the chunks are not those for the whole, and how far off.

    With each, whether it got what differs already: then something before it mixes samples.
    """
    n_calls, lengths = len(whole.calls), split.outcome.sizes
    # two passes call everything twice; the last calls have graphs
    chunks = [split.calls[i : i + n_calls] for i in range(0, len(split.calls), n_calls or 1)]
    chunks = chunks[-len(lengths) :]
    # control flow by data: calls can't be told to belong together
    if any(len(chunk) != n_calls for chunk in chunks):
        return
    for call, *parts in zip(whole.calls, *chunks, strict=True):
        outputs = [part.output for part in parts]
        # a loss, or a table of all positions, is nothing for samples
        if not _has_samples(call.output, outputs, lengths):
            continue
        error = relative_error(torch.cat(outputs), call.output)
        # NaN is off as well
        if not error <= rtol:
            given = [part.given for part in parts if part.given is not None]
            is_mixed = _is_mixed(call.given, given, lengths, rtol)
            if is_mixed is not None:
                yield call, error, is_mixed


def _is_mixed(
    whole: Tensor | None, parts: list[Tensor], lengths: Sequence[int], rtol: float
) -> bool | None:
    """Return whether what a module got for the chunks is not what it got for the whole.

    None if that says nothing of the module: the experts of a mixture get the rows that a router
    sends them, as many as these are, and in an order of their own.
    """
    # nothing, or what all samples share
    if whole is None or all(part.shape == whole.shape for part in parts):
        return False
    if not _has_samples(whole, parts, lengths):
        return None
    rows = torch.cat(parts)
    if relative_error(rows, whole) <= rtol:
        return False
    in_order, whole_in_order = (_numbers_of_rows(each).sort().values for each in (rows, whole))
    return None if relative_error(in_order, whole_in_order) <= rtol else True


def _numbers_of_rows(rows: Tensor) -> Tensor:
    """Return a number of each row, by which rows in another order can be known again."""
    dense = rows.cpu().to_dense()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    flat = real.reshape(len(rows), -1).double()
    # no plain sum: that of a normalized row is zero
    return flat @ torch.arange(flat.shape[1], dtype=torch.float64).cos()


def _recorders(name: str, calls: list[ModuleCall]) -> tuple[Any, Any]:
    # copies: this module or the next one may write in place, such as ReLU(inplace=True)
    waiting: list[Tensor | None] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = _first_tensor([*args, *kwargs.values()], of_floats=False)
        waiting.append(None if given is None else given.detach().clone())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        given, first = waiting.pop(), _first_tensor(output)
        if first is not None:
            calls.append(ModuleCall(name, type(module).__name__, given, first.detach().clone()))

    return before, after


def _first_tensor(output: Any, *, of_floats: bool = True) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() or not of_floats else None
    children = output.values() if isinstance(output, Mapping) else output
    if isinstance(children, tuple | list) or isinstance(output, Mapping):
        found = (_first_tensor(child, of_floats=of_floats) for child in children)
        return next((each for each in found if each is not None), None)
    return None


def _has_samples(whole: Tensor, parts: list[Tensor], lengths: Sequence[int]) -> bool:
    """Return whether the outputs have one row a sample (or a fixed number of rows)."""
    if (
        len(parts) != len(lengths)
        or whole.dim() == 0
        or whole.shape[0] == 0
        or whole.shape[0] % sum(lengths)
    ):
        return False
    # attention folds heads into the first dimension, and patches do
    per_sample = whole.shape[0] // sum(lengths)
    return all(
        part.dim() == whole.dim()
        and part.shape[0] == per_sample * length
        and part.shape[1:] == whole.shape[1:]
        for part, length in zip(parts, lengths, strict=True)
    )
