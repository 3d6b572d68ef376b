"""The parts of one step, and what every way to run it does with them.

Invariant: nothing here knows how a step is run; the passes and the run stand on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError
from tenure._oom import oom_info
from tenure._torch.compiler import has_compiled, is_compiled
from tenure._torch.quiet import without_functions
from tenure._torch.sharding import whole_of

from ..._callables import short_name_of
from ..._reachable import Reachable, StepModels, modules_given
from ..._undo import AllOf
from .._gradients import IsolatedGradients, SplitBackward, without_autocast
from .._loss import scalar
from .._modules import (
    GradientExchange,
    WrittenParameters,
    coupled_modules,
    normalization_error,
    refuse_coupled,
    refuse_sharded,
    wants_more_samples,
    written_modules,
)
from .._samples import CutInputs, SampleTree, expecting_other_sizes_of, used_up_graph_error
from ._arguments import StepSpec
from ._notes import tell_of_arguments, tell_of_part
from ._state import DeliveredTogether, StepState


class Chunk(NamedTuple):
    """A run of samples of the batch."""

    start: int
    length: int


Divisors = dict[Chunk, dict[str | None, object]]
"""What ``weight`` and the counts of terms were for each chunk, by term; None: of all terms."""


class StepParts:
    """The parts of one call.

    Args:
        spec: what to do.
        like: the parts of a call on another batch, with the same function: what that reaches is
            not searched again.
        values: with ``like``: the leaves of the batch.

    Attributes:
        spec: what to do.
        tree: the batch, taken apart.
        name: what errors and events call the work.
        leaves: the parts of the batch.
        values: what they hold.
        n_samples: the samples of the batch.
        inputs: the batch, to be cut.
        models: the modules.
        roots: those that the function runs, by name.
        smallest: the fewest samples that they can run on.
        trained: the parameters that are known, and other leaves that the function captures.
        devices: where the work is done.
        state: random state, and the state of modules; undoing it restarts a run.
        gradients: where new gradients go.
        exchange: whether modules exchange them with other processes.
        backward: makes them.
        found: what the functions use.
        reached: that, and the modules that are known before they run.
        writes: whether the function writes parameters.
        compiled: the compiled modules and functions that it runs.
        leaf_names: names of tensors that are no parameters of a module, by id.
        outside: tensors of any shape that the function takes from elsewhere, by name.
        aux: what the function returned beside its loss in this attempt, by the first sample.
        counts: what the sums of terms were divided by in this attempt, by name.
        divisors: what the means of each chunk of this attempt divide by.
        added: what was added once in this attempt.
        factor: what the gradients of all terms are multiplied by.
        around_backward: makes a block in which chunks run backward.
        is_asked: whether a run only asks, and is taken back.
        n_parts: how many micro-batches a split has, of sizes that differ by 1 at most; None: as
            many as the size gives.
    """

    def __init__(
        self, spec: StepSpec, like: StepParts | None = None, values: Sequence[Any] = ()
    ) -> None:
        self.spec = spec
        self.name = short_name_of(spec.fn)
        self.tree: SampleTree
        self.found: Reachable
        self.models: StepModels
        self.state: StepState
        if like is None:
            self.tree = SampleTree(spec.batch, spec.in_dims, name="batch", argument="in_dims")
        else:
            self.tree = like.tree.like([*values])
            self.spec = replace(spec, batch=self.tree.with_leaves([*values]))
        tree = self.tree
        self.leaves = tree.leaves
        self.values = tuple(leaf.value for leaf in tree.leaves)
        self.n_samples = tree.n_samples()
        self.inputs = CutInputs(tree, self.spec.batch)
        found = Reachable(spec.fn) if like is None else like.found
        self.found = found
        if like is not None:
            roots = dict(like.models.found)
        elif spec.model is None:
            roots = dict(found.modules)
            # a model may come with the batch, as in a population that is trained: see
            # test_modules_in_the_batch_are_found
            given = ((leaf.path, leaf.value) for leaf in tree.leaves)
            roots |= {path: value for path, value in given if isinstance(value, nn.Module)}
        else:
            roots = modules_given(spec.entry, spec.model)
        # modules of the loss see the whole batch, so they are no roots and may mix samples
        if like is None:
            found.look_into(spec.loss if callable(spec.loss) else None, spec.then, spec.once)
        self.models = StepModels(roots, found.modules.values(), is_given=spec.model is not None)
        self.roots = self.models.roots
        # statistics of one sample are none, and torch refuses them
        per_chunk = spec.batchnorm == "per_chunk" and coupled_modules(self.roots)
        self.smallest = 2 if per_chunk else 1
        self.trained = [*parameters_of(self.models.all), *found.captured()]
        leaves = [*self.trained, *self.inputs.leaves]
        self.devices = devices_of([*leaves, *self.values])
        known = None if like is None else like.state.generators
        generators = known or found.all_generators(self.models.all, self.values)
        self.state = StepState(self.models, self.devices, [*generators])
        self.exchange = GradientExchange(self.models.all)
        self.gradients = IsolatedGradients(leaves)
        self.backward = SplitBackward(self.gradients, spec.scaler, spec.backward, found.computed)
        self.aux: dict[int, Any] = {}
        self.counts: dict[str, Any] = {}
        self.divisors: Divisors = {}
        self.added: Tensor | None = None
        self.factor = 1.0
        self.around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.n_parts: int | None = None
        self.is_asked = False
        self.reached = (spec.fn, *found.visited(), *self.models.all)
        self.writes = WrittenParameters(spec.entry, self.name, self.roots)
        self.compiled = [*filter(is_compiled, self.reached)] if has_compiled() else []
        self.outside = found.constants | found.tensors
        self.leaf_names = {id(tensor): name for name, tensor in found.tensors.items()}
        # one that the function itself lets require grad has a gradient of no interest
        self.leaf_names |= {
            id(leaf.value): leaf.path
            for leaf in tree.leaves
            if isinstance(leaf.value, Tensor) and leaf.value.requires_grad
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a block whose modules are known by running, and noted before they change."""
        with (
            self.exchange.apart(),
            self.models.seeing(),
            self.models.telling(self.state.learn),
            self.models.telling(self.exchange.learn),
            expecting_other_sizes_of(self.compiled, lambda: self.inputs.length),
        ):
            yield

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Open a block in which modules exchange no gradients, nor afterwards."""
        held = GradientExchange(self.models.all, is_local=True)
        held.hold_back()
        try:
            with held.apart(), self.models.telling(held.learn):
                yield
        finally:
            held.undo()

    def rollback(self) -> AllOf:
        """Return the undo of all that an attempt changes."""
        rest = DeliveredTogether(self.exchange, self.gradients, self.state)
        return AllOf((self.inputs, rest))

    def begin(self, *, is_split: bool, is_trial: bool = False) -> None:
        """Start an attempt from the beginning; nothing of an earlier one counts."""
        self.aux, self.counts, self.divisors, self.added = {}, {}, {}, None
        self.inputs.begin()
        self.backward.begin(is_split=is_split, is_trial=is_trial)
        if (is_split and not self.spec.is_planned) or self.is_asked:
            self.writes.begin(asks=self.is_asked or (is_trial and not self.compiled))

    def call(self, batch: Any, start: int = 0) -> Any:
        """Run the function on samples from ``start`` on, and keep what is none of its loss."""
        try:
            with self.writes.guarded():
                returned = self.spec.fn(batch)
            self.writes.check()
        except TypeError as error:
            tell_of_arguments(error, self.spec.entry)
            raise
        if not self.spec.has_aux:
            return returned
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise AdaptiveUsageError(
                f"The function of {self.spec.entry}() returned a {type(returned).__name__}, and "
                "has_aux=True was asked for. Return a pair: what it would return without, and "
                "anything else."
            )
        loss, self.aux[start] = returned
        return loss

    def once(self) -> Tensor:
        """Return the part of the loss that is added once, whatever the split."""
        assert self.spec.once
        extra = scalar(whole_of(self.spec.once()), "once() of step()")
        self.added = extra.detach()
        return extra

    def check_splittable(self, size: int) -> None:
        """Make sure that no module that is known, and no hook, has to see the whole batch.

        Raises:
            BatchCoupledError: a module mixes samples.
            AdaptiveUsageError: other processes would wait, or a hook would see parts.
        """
        self.inputs.refuse_ambiguous()
        self._refuse_mixing(self.roots, size)
        self.backward.let_hooks_wait([p for p in self.gradients.leaves() if p.requires_grad])

    def forward(self, chunk: Chunk) -> Any:
        """Run the function, and see by what ran, and by what it wrote, whether it mixes samples."""
        start, length = chunk
        try:
            returned = self.call(self.inputs.chunk(start, length), start)
        except Exception as error:
            # a module that was seen to run is named; else the function itself calls the
            # normalization
            if isinstance(error, ValueError) and wants_more_samples(error):
                self._refuse_new(length)
                raise normalization_error(error, self.n_samples, length) from error
            if length < self.n_samples:
                tell_of_part(error, length, self.n_samples, self.outside)
            raise
        # after it ran, for modules are known only then; nothing was delivered yet
        self._refuse_new(length)
        # the first chunk tells: what a buffer collects, it collects of each
        if not start and self.spec.batchnorm == "refuse":
            written = written_modules(self.roots, self.state.modules.buffers)
            refuse_coupled(written, self.n_samples, length)
        return returned

    def _refuse_new(self, size: int) -> None:
        """Judge the modules that nobody knew before they ran."""
        if new := self.models.take_new_roots():
            self._refuse_mixing(new, size)

    def _refuse_mixing(self, roots: Mapping[str, nn.Module], size: int) -> None:
        if not self.spec.is_planned:
            refuse_sharded(roots, self.n_samples, size)
        if self.spec.batchnorm == "refuse":
            refuse_coupled(coupled_modules(roots), self.n_samples, size)

    def send_back(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        weightless: Sequence[Tensor] = (),
    ) -> None:
        """Run one chunk backward from some of its tensors.

        Args:
            tensors: the tensors.
            gradients: the gradient that each gets.
            weightless: those that have no weight; they run where other ranks wait for that.
        """
        # an output that the loss does not use gets none
        pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None]
        roots, seeds = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        self.run_back(roots, seeds, weightless)

    def run_back(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        weightless: Sequence[Tensor] = (),
    ) -> None:
        """Run backward, with a gradient of None for 1.

        Raises:
            AdaptiveUsageError: there is nothing to run, and other ranks wait for that.
        """
        is_planned = self.spec.is_planned
        with self.around_backward():
            has_run = self.backward.run(roots, seeds, weightless=weightless if is_planned else ())
        self.inputs.collect()
        if is_planned and not has_run:
            raise AdaptiveUsageError(
                f"The function of {self.spec.entry}() returned a loss that does not require grad, "
                "and its modules are sharded, so that other ranks may wait for this one in their "
                "backward pass: they get an error when this process ends. Call it with gradients "
                "enabled, and let the function return what its modules computed, whatever the "
                "samples are; where nothing counts, let weight= return 0."
            )

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients of the attempt so far."""
        self.gradients.scale(factor)
        self.inputs.scale(factor)

    def deliver_to_batch(self) -> None:
        """Send the gradients of the batch's own tensors on to what these were computed from."""
        if not self.inputs.get_gradients:
            return
        # these leaves were hidden behind the cut from every backward pass so far
        self.backward.watch(self.inputs.leaves)
        try:
            # that graph ran forward before the step, maybe outside of autocast: see
            # test_the_graph_of_the_batch_runs_backward_at_the_precision_of_its_forward
            with without_autocast(self.devices):
                self.inputs.deliver()
        except Exception as error:
            # any other error of that graph is the user's to see as it is
            if oom_info(error) is None or not self.inputs.has_graph:
                raise
            raise used_up_graph_error() from error


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Their own parameters, each once; not those of modules below them."""
    found = (p for module in modules for p in module._parameters.values() if p is not None)
    return list({id(parameter): parameter for parameter in found}.values())


def devices_of(values: list[Any]) -> list[torch.device]:
    """Return the devices of the tensors among some values, in order."""
    with without_functions():
        return list(dict.fromkeys(value.device for value in values if isinstance(value, Tensor)))
