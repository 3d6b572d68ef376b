"""The parts of one step, what every way to run it does with them, and what an attempt changes.

Invariant: nothing here knows how a step is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tenure._containers import level_of
from tenure._errors import AdaptiveUsageError, TenureError
from tenure._oom import oom_info
from tenure._text import describe_tensor, listed, shape_of
from tenure._torch.compiler import has_compiled, is_compiled
from tenure._torch.quiet import without_functions
from tenure._torch.sharding import whole_of
from tenure._torch.writes import version_of

from .._callables import short_name_of
from .._reachable import Reachable, StepModels, coupled_modules, modules_given
from .._undo import AllOf, Generator, ModuleState, RngState, generators_of
from ._arguments import StepSpec
from ._gradients import IsolatedGradients, SplitBackward
from ._loss import scalar
from ._modules import (
    GradientExchange,
    WrittenParameters,
    refuse_coupled,
    written_modules,
)
from ._samples import CutInputs, SampleTree, expecting_other_sizes_of


class StepState(AllOf):
    """Random state and the state of modules.

    Args:
        models: the modules that are known now; `learn` notes those that are seen later.
        devices: where the work is done.
        generators: generators of random numbers that are known now.

    Attributes:
        generators: generators of the user's own.
        rng: random state.
        modules: the state of modules.
    """

    __slots__ = ("_devices", "generators", "modules", "rng")

    def __init__(
        self,
        models: StepModels,
        devices: Sequence[torch.device],
        generators: list[Generator],
    ) -> None:
        self._devices = devices
        self.generators = generators
        self.rng = RngState(devices, self.generators, replays=False)
        self.modules = ModuleState(models.all)
        super().__init__((self.rng, self.modules))

    def learn(self, new: list[nn.Module]) -> None:
        """Note modules that were seen in the middle of an attempt."""
        generators = generators_of(new)
        # the list of the attempt, so that a later `random_now` has them too
        self.generators += generators
        self.rng.add(generators)
        self.modules.add(new)

    def random_now(self) -> RngState:
        """Random state as it is at this moment, to come back to in the middle of an attempt."""
        now = RngState(self._devices, self.generators)
        now.begin()
        return now


class Chunk(NamedTuple):
    """A run of samples of the batch."""

    start: int
    length: int


Divisors = dict[Chunk, dict[str | None, object]]
"""The ``weight`` and the counts of terms of each chunk, by term; None: of all terms."""


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
        writes: whether the function writes parameters; None where that does not matter.
        may_compile: whether anything is compiled in this process.
        compiled: the compiled modules and functions that it runs.
        needs_graphs: whether the function runs with gradients in a pass that needs none. Compiled
            code would be compiled once more without; each graph is freed with its outputs.
        aux: what the function returned beside its loss in this attempt, by the first sample, which
            is also their order.
        counts: what the sums of terms were divided by in this attempt, by name.
        divisors: what the means of each chunk of this attempt divide by.
        added: what was added once in this attempt.
        factor: what the gradients of all terms are multiplied by.
        scale_of_guess: what a guessed weight is multiplied by, which no gradient shows in the end
            but one of a backward pass that is not linear.
        around_backward: makes a block in which chunks run backward.
        is_asked: whether a run only asks, and is taken back.
        n_parts: how many micro-batches a split has, of sizes that differ by 1 at most; None: as
            many as the size gives.
    """

    def __init__(
        self, spec: StepSpec, like: StepParts | None = None, values: Sequence[Any] = ()
    ) -> None:
        self.name = short_name_of(spec.fn)
        if like is None:
            self.spec = spec
            self.tree = SampleTree(spec.batch, spec.in_dims, name="batch", argument="in_dims")
            self.found = Reachable(spec.fn)
            if spec.model is not None:
                roots = modules_given(spec.entry, spec.model)
            else:
                roots = self.found.modules.copy()
                for path, value, _ in self.tree.leaves:
                    # a model may come with the batch, as in a population that is trained
                    if isinstance(value, nn.Module):
                        roots[path] = value
            # modules of the loss see the whole batch: they are no roots and may mix samples
            for function in (spec.loss, spec.then, spec.once):
                if callable(function):
                    self.found.look_into(function)
        else:
            self.tree = like.tree.like([*values])
            self.spec = replace(spec, batch=self.tree.with_leaves([*values]))
            self.found = like.found
            roots = dict(like.models.found)
        found, self.leaves = self.found, self.tree.leaves
        self.values = tuple([leaf.value for leaf in self.leaves])
        self.inputs = CutInputs(self.tree, self.spec.batch)
        self.n_samples = self.inputs.n_samples
        self.models: StepModels = StepModels(
            roots, found.modules.values(), is_given=spec.model is not None
        )
        self.roots = self.models.roots
        # statistics of one sample are none, and torch refuses them
        per_chunk = spec.batchnorm == "per_chunk" and coupled_modules(self.roots)
        self.smallest = 2 if per_chunk else 1
        self.trained = parameters_of(self.models.all)
        if found.tensors:
            self.trained += found.captured()
        leaves = [*self.trained, *self.inputs.leaves]
        self.devices = devices_of([*leaves, *self.values])
        known = None if like is None else like.state.generators
        generators = known or found.all_generators(self.models.all, self.values)
        self.state: StepState = StepState(self.models, self.devices, [*generators])
        self.exchange: GradientExchange = (
            GradientExchange(self.models.all) if like is None else like.exchange
        )
        self.gradients = gradients = IsolatedGradients(leaves, self.inputs.frozen)
        self.models.listeners = [
            self.state.learn,
            self.exchange.learn,
            lambda new: gradients.learn(parameters_of(new)),
        ]
        # no cycle with this object: what a failed step holds is freed without the collector
        computed = self.inputs.computed
        self.backward = SplitBackward(
            gradients, spec.scaler, spec.backward, lambda: [*computed, *found.computed()]
        )
        self.aux: dict[int, Any] = {}
        self.counts: dict[str, Any] = {}
        self.divisors: Divisors = {}
        self.added: Tensor | None = None
        self.factor = self.scale_of_guess = 1.0
        self.around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.n_parts: int | None = None
        self.is_asked = False
        self.writes: WrittenParameters | None = None
        self.may_compile = has_compiled()
        self.compiled = [*filter(is_compiled, self.reached)] if self.may_compile else []
        self.needs_graphs = bool(self.compiled)

    @property
    def reached(self) -> tuple[Any, ...]:
        """What the functions use, and the modules that are known."""
        return (self.spec.fn, *self.found.visited(), *self.models.all)

    @property
    def leaf_names(self) -> dict[int, str]:
        """The names of tensors that are no parameters of a module, by id."""
        named = [*self.found.tensors.items(), *self.inputs.trained]
        return {id(tensor): name for name, tensor in named}

    @property
    def outside(self) -> dict[str, Tensor]:
        """Tensors of any shape that the function takes from elsewhere, by name."""
        return self.found.constants | self.found.tensors

    def watching(self) -> AbstractContextManager[Any]:
        """Open a block whose modules are known by running, and noted before they change."""
        if not (self.exchange.is_rank or self.compiled):
            return self.models.seeing()
        with ExitStack() as stack:
            stack.enter_context(self.exchange.apart())
            stack.enter_context(self.models.seeing())
            if self.compiled:
                inputs = self.inputs
                stack.enter_context(expecting_other_sizes_of(self.compiled, lambda: inputs.length))
            return stack.pop_all()

    def rollback(self) -> AllOf:
        """Return the undo of all that an attempt changes."""
        exchange = (self.exchange,) if self.exchange.is_rank else ()
        return AllOf((*exchange, self.gradients, self.state))

    def begin(self, *, is_split: bool, is_trial: bool = False) -> None:
        """Start an attempt from the beginning; nothing of an earlier one counts."""
        self.aux, self.counts, self.divisors, self.added = {}, {}, {}, None
        self.inputs.begin()
        self.backward.begin(is_split=is_split, is_trial=is_trial)
        self.writes = None
        if (is_split and not self.spec.is_planned) or self.is_asked:
            asks = self.is_asked or (is_trial and not self.compiled)
            self.writes = WrittenParameters(
                self.spec.entry, self.name, self.roots, self.found.tensors, asks=asks
            )

    def start_over(self) -> None:
        """Drop what this attempt has made so far; its function runs from the first sample again."""
        for leaf, _ in self.gradients.new():
            leaf.grad = None
        self.inputs.begin()
        self.state.undo()

    def call(self, batch: Any, start: int = 0) -> Any:
        """Run the function on samples from ``start`` on, and keep what is none of its loss."""
        try:
            if self.writes is None:
                returned = self.spec.fn(batch)
            else:
                with self.writes.guarded():
                    returned = self.spec.fn(batch)
                self.writes.check()
                # what the first chunk does not write, no other does
                self.writes = self.writes if self.writes.asks else None
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
        """Make sure that no module that is known has to see the whole batch.

        Raises:
            BatchCoupledError: a module mixes samples.
            AdaptiveUsageError: other processes would wait.
        """
        self.inputs.check_splittable()
        if not self.spec.is_planned:
            self.exchange.check_splittable()
            self.exchange.refuse_active_replica()
        self._refuse_mixing(self.roots, size)

    def let_hooks_wait(self) -> None:
        """Make sure that no hook of a leaf that is known sees a part of a gradient.

        Raises:
            AdaptiveUsageError: one would.
        """
        # those of a run that is thrown away wait already
        if not self.backward.is_thrown_away:
            self.backward.let_hooks_wait(self.gradients.leaves())

    def forward(self, chunk: Chunk) -> Any:
        """Run the function, and see by what ran, and by what it wrote, whether it mixes samples."""
        start, length = chunk
        try:
            returned = self.call(self.inputs.chunk(start, length), start)
        except Exception as error:
            # such as BatchNorm of a single sample
            if self.models.new and isinstance(error, ValueError):
                self._refuse_new(length)
            if length < self.n_samples:
                shared = [f"{leaf.path} (in_dims=None)" for leaf in self.leaves if leaf.is_shared]
                tell_of_part(error, length, self.n_samples, self.outside, shared)
            raise
        if start in self.aux:
            self.aux[start] = _lasting(self.aux[start])
        # after it ran, for modules are known only then; nothing was delivered yet
        if self.models.new:
            self._refuse_new(length)
        # the first chunk tells: what a buffer collects, it collects of each
        looks = not start and self.spec.batchnorm == "refuse"
        if looks and (written := written_modules(self.roots, self.state.modules)):
            refuse_coupled(written, self.n_samples, length, is_written=True)
        return returned

    def _refuse_new(self, size: int) -> None:
        """Judge the modules that nobody knew before they ran."""
        new, self.models.new = self.models.new, {}
        self._refuse_mixing(new, size)

    def _refuse_mixing(self, roots: Mapping[str, nn.Module], size: int) -> None:
        if self.spec.batchnorm == "refuse" and (found := coupled_modules(roots)):
            refuse_coupled(found, self.n_samples, size)

    def send_back(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        weightless: Sequence[Tensor] = (),
    ) -> None:
        """Run backward.

        Args:
            roots: tensors of any shape.
            seeds: the gradient that each gets; None for 1.
            weightless: those that have no weight; they run where other ranks wait for that.

        Raises:
            AdaptiveUsageError: there is nothing to run, and other ranks wait for that.
        """
        is_planned = self.spec.is_planned
        with self.around_backward():
            has_run = self.backward.run(roots, seeds, weightless=weightless if is_planned else ())
        if is_planned and not has_run:
            raise AdaptiveUsageError(
                f"The function of {self.spec.entry}() returned a loss that does not require grad, "
                "and its modules are sharded, so that other ranks may wait for this one in their "
                "backward pass: they get an error when this process ends. Call it with gradients "
                "enabled, and let the function return what its modules computed, whatever the "
                "samples are; where nothing counts, let weight= return 0."
            )


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Their own parameters, each once; not those of modules below them."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
    return list(found.values())


def devices_of(values: list[Any]) -> list[torch.device]:
    """Return the devices of the tensors among some values, in order."""
    found: dict[torch.device, None] = {}
    with without_functions():
        for value in values:
            if isinstance(value, Tensor):
                found[value.device] = None
    return list(found)


class FunctionState(AllOf):
    """Gradients, random state and the state of the modules that a function reaches.

    Args:
        fn: the function; what its code names is known before it runs.

    Attributes:
        devices: those of the tensors that it reaches.
        reached: what the function uses.
        parameters: the identities of the leaves that were there before it ran; they live as long.
    """

    __slots__ = (
        "_captured", "_gradients", "_leaves", "_models", "_state", "devices", "parameters",
        "reached",
    )  # fmt: skip

    def __init__(self, fn: Callable[..., Any]) -> None:
        found = Reachable(fn)
        self._models = StepModels(dict(found.modules), (), is_given=False)
        self.reached = [fn, *found.visited(), *self._models.all]
        self._captured = found.tensors
        self._leaves = [*parameters_of(self._models.all), *found.captured()]
        self.devices: list[torch.device] = devices_of(list(self._leaves))
        self.parameters = frozenset(map(id, self._leaves))
        generators = found.all_generators(self._models.all)
        self._state = StepState(self._models, self.devices, generators)
        self._gradients = IsolatedGradients(self._leaves)
        super().__init__((self._gradients, self._state))
        watch = self._gradients.watch
        self._models.listeners = [self._state.learn, lambda new: watch(parameters_of(new))]

    def watching(self) -> AbstractContextManager[None]:
        """Return a block whose modules are known by running, and noted before they change."""
        return self._models.seeing()

    def writes(self, entry: str, function: str) -> WrittenParameters:
        """Return the check that the function, as errors call it, writes no parameter."""
        return WrittenParameters(entry, function, self._models.roots, self._captured, asks=True)


_MOST_NAMED = 3
_CALL_OF_MODULES = "_call_impl"
"""The function of torch in which a module calls its ``forward``."""


def tell_of_part(
    error: Exception,
    length: int,
    n_samples: int,
    outside: Mapping[str, Tensor],
    shared: Sequence[str],
) -> None:
    """Note on an error that the function ran on a part of the batch, where it is not told already.

    Args:
        error: what the function raised.
        length: the samples that it got.
        n_samples: the samples of the batch.
        outside: tensors of any shape that it takes from elsewhere than the batch, by name.
        shared: the tensors of the batch that all samples share.
    """
    if isinstance(error, TenureError) or oom_info(error) is not None:
        return
    found = [
        f"{name} ({describe_tensor(each)})"
        for name, each in outside.items()
        if shape_of(each)[:1] == (n_samples,)
    ]
    told = ""
    if found or (outside and not shared):
        named = f": {listed(found, _MOST_NAMED)}" if found else ""
        told = (
            f" Tensors that it takes from outside were not split{named}. Pass them in the batch, "
            "as in step(fn, (x, y))."
        )
    elif shared:
        told = f" {listed(shared, _MOST_NAMED)} was not split."
    error.add_note(f"step() ran the function on {length} of {n_samples} samples.{told}")


def tell_of_arguments(error: TypeError, entry: str) -> None:
    """Note on an error of the call itself, as of a function of two arguments, what is passed."""
    at, depth = error.__traceback__, 0
    while at is not None and at.tb_next is not None:
        at, depth = at.tb_next, depth + 1
    # one of a frame farther in is of the user's own code, or of code that it calls
    if at is None or (depth and at.tb_frame.f_code.co_name != _CALL_OF_MODULES):
        return
    error.add_note(
        f"The function of {entry}() gets one argument, the batch, as it was passed: let it take "
        "that apart, as in step(lambda batch: loss(model(batch[0]), batch[1]), (x, y))."
    )


def _lasting(value: Any) -> Any:
    """Copy containers, arrays and tensors that were written: the function may use them again."""
    if isinstance(value, Tensor):
        return value.clone() if version_of(value) else value
    if hasattr(type(value), "__array_interface__"):
        return value.copy()
    level = level_of(value)
    return value if level is None else level.make([*map(_lasting, level.children)])
