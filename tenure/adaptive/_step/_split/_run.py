"""One step at a given micro-batch: forward and backward of every chunk, gradients exact.

Invariant: a run starts the step from the beginning and depends on nothing that an earlier run did,
and at most one chunk's graph is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenure._torch.quiet import without_functions

from ..._oom import oom_info
from .._gradients import IsolatedGradients, SplitBackward, without_autocast
from .._loss import ONLY, check_weight_is_used, scalar, terms_of, whole_loss
from .._modules import (
    StepModels,
    coupled_modules,
    normalizes,
    refuse_coupled,
    refuse_distributed,
    wants_more_samples,
    written_modules,
)
from .._samples import CutInputs, Outputs, graph_is_used_up
from ._outputs_pass import OutputsPass
from ._spec import Chunk, StepSpec
from ._state import StepState
from ._terms_pass import TermsPass


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a run gives.

    Attributes:
        loss: of no dimension, without graph; with what ``once`` adds.
        terms: the same by name, without that.
        sizes: the samples of each micro-batch.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    sizes: tuple[int, ...]


class StepRun:
    """Runs a step at one micro-batch after another, until one fits.

    Args:
        spec: what to do.
        inputs: the batch.
        n_samples: how many it has.
        models: the modules.
        state: random state and the state of modules, noted when the run began; undoing it restarts
            the run.
        gradients: where new gradients go.
        computed: names captured tensors with a graph of their own, for an error.
        devices: where the work is done.

    Attributes:
        before_split: is told the size of micro-batches before the first one runs; may raise.
        before_delivery: looks at what a split run gave before any gradient leaves it; may raise.
    """

    def __init__(
        self,
        spec: StepSpec,
        inputs: CutInputs,
        n_samples: int,
        *,
        models: StepModels,
        state: StepState,
        gradients: IsolatedGradients,
        computed: Callable[[], list[str]],
        devices: Sequence[torch.device],
    ) -> None:
        self.spec = spec
        self.inputs = inputs
        self.n_samples = n_samples
        self.models = models
        self.roots = models.roots
        self.state = state
        self._gradients = gradients
        self.backward = SplitBackward(gradients, spec.scaler, computed)
        self.devices = devices
        self.before_split: Callable[[int], object] | None = None
        self.before_delivery: Callable[[StepOutcome], object] | None = None

    def run(self, size: int) -> StepOutcome:
        """Run the whole step in micro-batches of ``size`` samples."""
        self.inputs.begin()
        is_split = size < self.n_samples
        self.backward.begin(is_split=is_split)
        with self.watching():
            outcome = self._split(size) if is_split else self._whole()
        self.backward.check_ran()
        if is_split and self.before_delivery is not None:
            self.before_delivery(outcome)
        self._deliver()
        return outcome

    def try_out(self, size: int) -> None:
        """Run micro-batches of a size, to see what they need; the state is to be undone then.

        Two of them, because the second finds the gradients of the first beside it.
        """
        self.inputs.begin()
        self.backward.begin(is_split=True)
        with self.watching():
            self._check_splittable(size)
            for chunk in self._chunks(size)[:2]:
                self._try_chunk(chunk)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block whose modules are known by running, and noted before they change."""
        with self.models.seeing(), self.models.telling(self.state.learn):
            yield

    def _try_chunk(self, chunk: Chunk) -> None:
        returned = self.forward(chunk)
        if callable(self.spec.loss):
            tensors = Outputs(returned, self.spec.out_dims, chunk.length).tensors
        else:
            tensors = [term.value for term in terms_of(returned, self.spec.loss).by_name.values()]
        self.send_back(tensors, [torch.ones_like(tensor) for tensor in tensors])

    # --- in one piece

    def _whole(self) -> StepOutcome:
        spec = self.spec
        if self.inputs.has_graph:  # a leaf of both graphs gets its gradient in two passes
            self._gradients.hold_hooks(self.inputs.leaves)
        loss, terms = self.whole_loss()
        if spec.once is not None:
            loss = loss + self.once()
        self.backward.run([self.backward.scaled(loss)], [None])
        self.inputs.collect()
        detached = {name: value.detach() for name, value in terms.items()}
        return StepOutcome(loss.detach(), detached, (self.n_samples,))

    def whole_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the function on the batch; the loss, and its terms."""
        spec = self.spec
        with self.inputs.expecting_other_sizes():
            returned = spec.fn(self.inputs.whole())
        if callable(spec.loss):
            loss = scalar(spec.loss(returned), "loss() of step()")
            return loss, {ONLY: loss}
        with without_functions():
            terms = terms_of(returned, spec.loss)
        check_weight_is_used(terms, spec.weight)
        return whole_loss(terms, spec.then)

    def once(self) -> Tensor:
        """What is added once, whatever the split."""
        assert self.spec.once is not None
        return scalar(self.spec.once(), "once() of step()")

    # --- in several

    def _split(self, size: int) -> StepOutcome:
        self._check_splittable(size)
        if self.before_split is not None:
            self.before_split(size)
        chunks = self._chunks(size)
        kind = OutputsPass if callable(self.spec.loss) else TermsPass
        loss, terms = kind(self, chunks).run()
        if self.spec.once is not None:
            extra = self.once()
            self.backward.run([self.backward.scaled(extra)], [None])
            loss = loss + extra.detach()
        return StepOutcome(loss, terms, tuple(length for _, length in chunks))

    def _check_splittable(self, size: int) -> None:
        refuse_distributed(self.roots, self.n_samples, size)
        if self.spec.batchnorm == "refuse":
            refuse_coupled(coupled_modules(self.roots), self.n_samples, size)
        self.backward.let_hooks_wait([p for p in self._gradients.leaves() if p.requires_grad])

    def _chunks(self, size: int) -> list[Chunk]:
        """How the batch is split; one sample alone at the end gets a partner.

        It has no statistics, and compiled code would be compiled once more for it. The partner
        comes from the chunk before. Where that has only two, a chunk is larger than ``size``, if
        a module is known that can't run on one sample.
        """
        starts = range(0, self.n_samples, size)
        chunks = [Chunk(start, min(size, self.n_samples - start)) for start in starts]
        if size == 1 or chunks[-1].length > 1:
            return chunks
        *others, before, last = chunks
        if size > 2:
            return [*others, Chunk(before.start, size - 1), Chunk(last.start - 1, 2)]
        if self.spec.batchnorm == "per_chunk" and coupled_modules(self.roots):
            return [*others, Chunk(before.start, size + 1)]
        return chunks

    def forward(self, chunk: Chunk) -> Any:
        """Run the function, and see by what ran, and by what it wrote, whether it mixes samples."""
        start, length = chunk
        try:
            returned = self.spec.fn(self.inputs.chunk(start, length))
        except ValueError as error:
            if wants_more_samples(error):
                self._refuse_new(length)
                raise normalizes(error, self.n_samples, length) from error
            raise
        self._refuse_new(length)
        if not start and self.spec.batchnorm == "refuse":
            written = written_modules(self.roots, self.state.modules.buffers)
            refuse_coupled(written, self.n_samples, length)
        return returned

    def _refuse_new(self, size: int) -> None:
        """Judge the modules that nobody knew before they ran."""
        new = self.models.take_new_roots()
        if new:
            refuse_distributed(new, self.n_samples, size)
            if self.spec.batchnorm == "refuse":
                refuse_coupled(coupled_modules(new), self.n_samples, size)

    def send_back(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Run one chunk backward from some of its tensors, each with the gradient it gets."""
        pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None]
        self.backward.run([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        self.inputs.collect()

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients of the run so far."""
        self._gradients.scale(factor)
        self.inputs.scale(factor)

    def _deliver(self) -> None:
        if not self.inputs.get_gradients:
            return
        self.backward.watch(self.inputs.leaves)
        try:
            with without_autocast(self.devices):
                self.inputs.deliver()
        except Exception as error:
            if oom_info(error) is None or not self.inputs.has_graph:
                raise
            raise graph_is_used_up() from error
