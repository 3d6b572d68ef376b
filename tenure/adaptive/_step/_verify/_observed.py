"""A step that is run to be looked at: what it left is noted and taken back; and two compared.

Of each module is noted what it returned, to find the first that mixes the samples of its batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._containers import passed_tensors
from tenure._torch.quiet import without_functions

from ..._callables import unused
from ..._undo import AllOf, Rollback, named_modules
from .._loss import ONLY
from .._modules import no_optimizer_steps
from .._parts import StepParts
from .._split import StepOutcome, run_at
from ._compare import (
    GRADIENT_FLOOR,
    CheckFinding,
    DifferenceKind,
    SplitDifference,
    farthest,
    largest_value,
    relative_error,
)

LeafNames = dict[int, tuple[Tensor, str]]
"""Leaves without a name by identity, kept so that it stays theirs, and what they are called."""


class Observed(NamedTuple):
    """The results of one run.

    Attributes:
        outcome: its losses, and the sizes it ran in.
        gradients: copies of those that it made, by the name of their leaf.
        buffers: copies of all of them by name, as the run left them; none unless watched.
        calls: what modules returned, those of all chunks one after the other; likewise.
        draws: whether random numbers were drawn, and whether others than torch's; only if asked.
    """

    outcome: StepOutcome
    gradients: dict[str, Tensor] = {}  # noqa: RUF012  # nobody writes there
    buffers: dict[str, Tensor] = {}  # noqa: RUF012
    calls: Sequence[ModuleCall] = ()
    draws: tuple[bool, bool] = (False, False)

    def by_name(self) -> dict[DifferenceKind, dict[str, Tensor]]:
        """Return all numbers that are compared, by kind and name."""
        # a single term is the loss, and would be told twice
        terms = self.outcome.terms if len(self.outcome.terms) > 1 else {}
        loss = {ONLY: self.outcome.loss}
        return {"buffer": self.buffers, "loss": loss, "term": terms, "gradient": self.gradients}

    def tensors(self) -> list[Tensor]:
        """Return all that rounding may have changed: a float64 model may have a loss in float32."""
        outcome = self.outcome
        return [*self.gradients.values(), outcome.loss, *outcome.terms.values()]


def observed_run(
    parts: StepParts, size: int, *, watch: bool, asks: bool, names: LeafNames
) -> Observed:
    """Run the step at a size, note what it left, and take it back.

    Args:
        parts: the step.
        size: the samples of a micro-batch.
        watch: look at buffers and at what modules return too; their copies take memory.
        asks: refuse to write a parameter before it is written, and see what numbers are drawn.
        names: what leaves without a name are called, in other runs too; gets new ones.
    """
    state: Rollback = AllOf((parts.state, parts.gradients))
    parts.is_asked = asks
    watched: AbstractContextManager[list[ModuleCall]]
    watched = _recorded(parts.roots) if watch else nullcontext([])
    with watched as calls, no_optimizer_steps(parts.spec.entry):
        state.begin()
        try:
            # nor do those of leaves that are seen only when they run
            parts.backward.is_thrown_away = True
            parts.backward.let_hooks_wait(parts.gradients.leaves())
            outcome = run_at(parts, size)
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
    names: dict[int, str] = {}
    for name, module in named_modules(roots):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), f"{name}.{key}")
    return names


def buffers_of(parts: StepParts) -> dict[str, Tensor]:
    """Copy the buffers as they are, by name."""
    return {
        f"{name}.{key} ({type(module).__name__})": buffer.detach().clone()
        for name, module in named_modules(parts.roots)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def differences(
    whole: Observed, other: Observed, rtol: float, nameless: LeafNames, scale: float = 0.0
) -> list[SplitDifference]:
    """Return the differences above ``rtol``: buffers, the loss and its terms, gradients.

    Args:
        whole: a run.
        other: another one.
        rtol: what may be off.
        nameless: leaves without a name, of both runs. What only one of them has was made by the
            function itself, and nobody sees its gradient.
        scale: a loss or term that is much smaller counts as nothing.
    """
    found: list[SplitDifference] = []
    made = {name for _, name in nameless.values()} & (
        whole.gradients.keys() ^ other.gradients.keys()
    )
    two = other.by_name()
    for kind, one in whole.by_name().items():
        floor = 0.0 if kind == "buffer" else scale
        # such as that of a bias before a normalization, which is rounding alone
        if kind == "gradient":
            floor = GRADIENT_FLOOR * max(map(largest_value, one.values()), default=0.0)
        for name in dict.fromkeys([*one, *two[kind]]):
            error = _error(one.get(name), two[kind].get(name), floor)
            if not error <= rtol and not (kind == "gradient" and name in made):
                found.append(SplitDifference(kind, name, error))
    return found


def worst(found: Iterable[SplitDifference], whole: Observed, split: Observed) -> CheckFinding:
    """Return the worst difference: of the loss, a term, or the gradient farthest off."""
    # users know their loss; a gradient is named only where the loss hides the difference
    first = max(found, key=lambda each: (each.kind in ("loss", "term"), each.relative_error))
    a, b = (run.by_name()[first.kind].get(first.name) for run in (whole, split))
    what = f"the gradient of {first.name!r}" if first.kind == "gradient" else told_of(first.name)
    return CheckFinding(what, *farthest(a, b), first.relative_error, split.outcome.sizes)


def told_of(name: str) -> str:
    """Return what a term is called in errors."""
    return "the loss" if name == ONLY else f"the term {name!r}"


def _error(whole: Tensor | None, other: Tensor | None, floor: float) -> float:
    """Return how far off; a gradient that is not there counts as zeros."""
    if whole is None or other is None:
        there = whole if other is None else other
        return 0.0 if there is None or not bool(there.count_nonzero()) else float("inf")
    if whole.shape != other.shape:
        return float("inf")
    return relative_error(other, whole, floor)


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
        name: the module, as its root and its path below that, and its type.
        given: a copy of the first tensor that it got; None for none.
        output: a copy of the first tensor of floating point that it returned.
    """

    name: str
    given: Tensor | None
    output: Tensor


@contextmanager
def _recorded(roots: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Note each call of each module in the block, innermost first."""
    calls: list[ModuleCall] = []
    with ExitStack() as hooks:
        for name, module in named_modules(roots):
            hook = functools.partial(_record, name, calls)
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield calls


def first_module(whole: Observed, split: Observed, rtol: float) -> list[SplitDifference]:
    """Return the first module whose outputs for the chunks are not those for the whole, if any.

    One that gets what differs already is innocent, because something before it mixes samples.
    """
    n_calls, lengths = len(whole.calls), split.outcome.sizes
    # two passes call everything twice; the last calls have graphs
    chunks = [split.calls[i : i + n_calls] for i in range(0, len(split.calls), n_calls or 1)]
    chunks = chunks[-len(lengths) :]
    # control flow by data: calls can't be told to belong together
    if any(len(chunk) != n_calls for chunk in chunks):
        return []
    for call, *parts in zip(whole.calls, *chunks, strict=True):
        rows = _rows([part.output for part in parts], call.output, lengths)
        # a loss, or a table of all positions, is nothing for samples
        if rows is None or (error := relative_error(rows, call.output)) <= rtol:
            continue
        given = [part.given for part in parts if part.given is not None]
        # nothing, or what all samples share
        if call.given is not None and any(part.shape != call.given.shape for part in given):
            rows = _rows(given, call.given, lengths)
            # the experts of a mixture get as many rows as a router sends them
            if rows is None or not relative_error(rows, call.given) <= rtol:
                continue
        return [SplitDifference("module", call.name, error)]
    return []


def _rows(parts: Sequence[Tensor], whole: Tensor, lengths: Sequence[int]) -> Tensor | None:
    """Return the rows of parts if there are as many for each sample, as in the whole.

    Attention folds heads into the first dimension, and so do patches.
    """
    n_rows, is_odd = divmod(len(whole) if whole.dim() else 0, sum(lengths))
    shapes = [(n_rows * length, *whole.shape[1:]) for length in lengths]
    if is_odd or not n_rows or [tuple(part.shape) for part in parts] != shapes:
        return None
    return torch.cat([*parts])


def _record(
    name: str, calls: list[ModuleCall], module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    # copies: the next module may write in place, such as ReLU(inplace=True)
    given = next(passed_tensors([args, kwargs]), None)
    floats = (each for each in passed_tensors(output) if each.is_floating_point())
    first = next(floats, None)
    if first is not None:
        named = f"{name} ({type(module).__name__})"
        kept = None if given is None else given.detach().clone()
        calls.append(ModuleCall(named, kept, first.detach().clone()))
