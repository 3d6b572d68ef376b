"""A step that is run to be looked at: what it left is noted and taken back; and two compared.

The one home of what `check_split` and the verification of `step` call the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from ..._callables import unused
from ..._undo import AllOf, Rollback
from .._loss import ONLY
from .._modules import named_modules, named_parameters, no_optimizer_steps
from .._split import StepOutcome, StepSetup
from ._compare import CHECKED, GRADIENT_FLOOR, largest_value, relative_error
from ._module_outputs import ModuleCall, first_difference, recorded
from ._split_report import DifferenceKind, SplitDifference

LeafNames = dict[int, tuple[Tensor, str]]
"""Leaves without a name by identity, kept so that it stays theirs, and what they are called."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one run left.

    Attributes:
        outcome: its losses, and the sizes it ran in.
        gradients: copies of those that it made, by the name of their leaf.
        buffers: copies of all of them by name, as the run left them; none unless watched.
        calls: what modules returned, those of all chunks one after the other; likewise.
    """

    outcome: StepOutcome
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: list[ModuleCall]

    def tensors(self) -> list[Tensor]:
        """All that rounding may have changed: a float64 model may have a loss in float32."""
        outcome = self.outcome
        return [*self.gradients.values(), outcome.loss, *outcome.terms.values()]


def trial(
    setup: StepSetup,
    size: int,
    *,
    watch: bool = True,
    other_numbers: bool = False,
    names: LeafNames | None = None,
) -> Trial:
    """Run the step at a size, note what it left, and take it back.

    Args:
        setup: the step.
        size: the samples of a micro-batch.
        watch: look at buffers and at what modules return too; their copies take memory.
        other_numbers: let it draw other random numbers.
        names: what leaves without a name are called, in other runs too.
    """
    state: Rollback = AllOf((setup.state, setup.gradients))
    watched: AbstractContextManager[list[ModuleCall]]
    watched = recorded(setup.roots) if watch else nullcontext([])
    with watched as calls, no_optimizer_steps(setup.run.spec.entry):
        state.begin()
        try:
            if other_numbers:
                setup.rng.draw()
            # no hook of the user's sees a gradient that is thrown away
            leaves = [leaf for leaf in setup.gradients.leaves() if leaf.requires_grad]
            setup.run.backward.let_hooks_wait(leaves)
            outcome = setup.run.run(size)
            return Trial(
                outcome,
                _gradients(setup, {} if names is None else names),
                buffers_of(setup) if watch else {},
                calls,
            )
        finally:
            state.undo()
            setup.state.finish()  # an error holds this frame, and must not hold copies


def _gradients(setup: StepSetup, nameless: LeafNames) -> dict[str, Tensor]:
    """Copies of the gradients that a run made, by name.

    Args:
        setup: the step.
        nameless: what leaves are called that were not known before they were used, which come in no
            order, or are others in each run; gets new ones.
    """
    names = _parameter_names(setup.run.models.found) | setup.leaf_names
    seen = _parameter_names(setup.roots)
    found: dict[str, Tensor] = {}
    for leaf, gradient in setup.gradients.new():
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


def buffers_of(setup: StepSetup) -> dict[str, Tensor]:
    """Copies of the buffers as they are, by name."""
    return {
        f"{name}.{key} ({type(module).__name__})": buffer.detach().clone()
        for name, module in named_modules(setup.roots)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def differences(whole: Trial, other: Trial, rtol: float) -> list[SplitDifference]:
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
    floor = largest * GRADIENT_FLOOR if kind == "gradient" else 0.0
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


def first_module(whole: Trial, split: Trial, rtol: float) -> list[SplitDifference]:
    """The module that mixes samples, if one does; the last calls are those of the chunks."""
    n_calls, lengths = len(whole.calls), split.outcome.sizes
    chunks = [split.calls[i : i + n_calls] for i in range(0, len(split.calls), n_calls or 1)]
    found = first_difference(whole.calls, chunks[-len(lengths) :], lengths, rtol)
    if found is None:
        return []
    call, error = found
    return [SplitDifference("module", f"{call.name} ({call.kind})", error)]


def default_rtol(result: Trial) -> float:
    """The relative error that rounding explains, by the types of all that the run gave."""
    # under autocast modules return coarser types than gradients have
    return CHECKED.of([*result.tensors(), *(call.output for call in result.calls)])
