"""The step that is verified, on any of its samples, with random numbers that can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tenure._torch.modules import BatchNorm, InstanceNorm

from ..._undo import RngState
from .._modules import named_modules, without_dropout
from .._samples import SampleDims, SampleTree
from .._split import StepSetup, StepSpec
from ._fitting import first_that_fits
from ._random import ConstantNumbers
from ._rounding import RoughRounding
from ._samples import part_of


class Subject:
    """The step.

    Args:
        spec: what it does.
        batch: its batch.
        in_dims: where that has its samples.
        model: as the user passed it.

    Attributes:
        spec: what is verified: no scaler, and a loss of outputs is one that adds them up, because
            the user's may want as many samples as there are, and sees all of them anyway.
        tree: the batch.
        n_samples: how many it has.
        is_random: whether it draws random numbers.
        draws_elsewhere: whether it draws others than torch's.
    """

    def __init__(self, spec: StepSpec, batch: Any, in_dims: SampleDims, model: Any) -> None:
        self.spec = dataclasses.replace(spec, scaler=None)
        if callable(spec.loss):
            self.spec = dataclasses.replace(self.spec, loss=_mixed_sum, once=None)
        self.tree = SampleTree(batch, in_dims, name="batch", argument="in_dims")
        self.n_samples = self.tree.n_samples()
        self.is_random = True
        self.draws_elsewhere = True
        self._shared: dict[int, Any] = {}
        self._in_dims: SampleDims = in_dims
        self._model = model

    def taken(self, indices: Sequence[int] | None) -> Any:
        """A container like the batch, of copies of some samples, without their graphs.

        Args:
            indices: which samples; None for all, which are no copies.
        """
        parts = []
        for i, leaf in enumerate(self.tree.leaves):
            if leaf.is_split:
                parts.append(part_of(leaf, indices))
            else:  # the same tensor in each run, so that its gradient is known again
                if i not in self._shared:
                    self._shared[i] = part_of(leaf, None)
                parts.append(self._shared[i])
        return self.tree.with_leaves(parts)

    def see_random_numbers(self) -> None:
        """Run two samples, and see what numbers they draw."""

        def look(n: int) -> tuple[bool, bool]:
            setup = self.of(self.taken(range(n)))
            setup.state.begin()
            try:
                with setup.run.watching():
                    setup.run.spec.fn(setup.run.inputs.whole())
                return setup.rng.has_drawn(), setup.rng.has_drawn(elsewhere=True)
            finally:
                setup.state.undo()
                setup.state.finish()

        self.is_random, self.draws_elsewhere = first_that_fits(look, (2,)) or (True, True)

    def of(self, part: Any) -> StepSetup:
        """The step on other samples, that are copies."""
        setup = StepSetup(self.spec, part, self._in_dims, self._model)
        setup.run.inputs.expects_writes = True
        return setup


@contextmanager
def comparable(
    setup: StepSetup, *, is_random: bool, rough: RoughRounding | None = None
) -> Iterator[ConstantNumbers]:
    """A block in which a step draws the same random numbers for any number of samples.

    Numbers that torch does not draw are only set back for each call of the function; those of each
    sample are then others where it stands at another place.

    Args:
        setup: the step.
        is_random: whether it draws random numbers.
        rough: how much worse each operation rounds.
    """
    numbers = ConstantNumbers()
    with ExitStack() as block:
        block.enter_context(without_dropout(setup.roots))
        if setup.run.spec.batchnorm == "per_chunk":
            block.enter_context(_without_statistics(setup.roots))
        if rough is not None:  # below the constant numbers, for it draws some of its own
            block.enter_context(rough)
        if is_random:
            block.enter_context(set_back(setup))
            block.enter_context(numbers)
        yield numbers


@contextmanager
def set_back(setup: StepSetup) -> Iterator[None]:
    """A block in which each call of the function starts from the random state of its beginning."""
    run, spec = setup.run, setup.run.spec
    start = RngState(run.devices, run.state.generators)
    start.begin()
    run.spec = dataclasses.replace(spec, fn=_after(start.undo, spec.fn))
    try:
        yield
    finally:
        run.spec = spec
        start.undo()


def _after(first: Callable[[], None], fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(batch: Any) -> Any:
        first()
        return fn(batch)

    return both


@contextmanager
def _without_statistics(roots: Mapping[str, nn.Module]) -> Iterator[None]:
    """Normalize with running statistics: those of a micro-batch were asked for."""
    kinds = (BatchNorm, InstanceNorm)
    found = [
        module
        for _, module in named_modules(roots)
        if isinstance(module, kinds) and module.training and module.running_mean is not None
    ]
    try:
        for module in found:
            module.training = False
        yield
    finally:
        for module in found:
            module.training = True


def _mixed_sum(outputs: Any) -> Tensor:
    """A loss to which each element of the outputs counts, and each sample differently."""
    tree = SampleTree(outputs, None, name="output", argument="out_dims", reaches=lambda _: True)
    total: Any = 0.0
    for tensor in _floats(leaf.value for leaf in tree.leaves):
        numbers = torch.Generator().manual_seed(0)
        factors = torch.rand(tensor.shape, generator=numbers, dtype=torch.float32) + 0.5
        real = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
        total = total + (real * factors.to(real)).sum()
    if not isinstance(total, Tensor):
        raise TypeError("no outputs of floating point")
    return total


def _floats(values: Iterator[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            yield value
