"""One step at a given micro-batch: forward and backward of every chunk, gradients exact.

Invariant: a run starts the step from the beginning and depends on nothing that an earlier run did,
and at most one chunk's graph is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._oom import oom_info
from .._retry import BufferState, Generator, Rollback
from ._coupled import coupled_modules, refuse_coupled, written_modules
from ._cut_inputs import CutInputs, graph_is_used_up
from ._distributed import refuse_distributed
from ._gradients import IsolatedGradients
from ._outputs_pass import OutputsPass
from ._spec import Chunk, StepSpec
from ._split_backward import SplitBackward, without_autocast
from ._terms import ONLY, check_weight_is_used, scalar, terms_of, whole_loss
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
        roots: the modules of the function, by name.
        models: all that anything of the step uses.
        buffers: their buffers, noted when the run began.
        generators: the generators of random numbers that it uses besides those of the devices.
        state: random state, buffers and attributes, noted when the run began; undoing it restarts
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
        roots: dict[str, nn.Module],
        models: Sequence[nn.Module],
        buffers: BufferState,
        generators: Sequence[Generator],
        state: Rollback,
        gradients: IsolatedGradients,
        computed: Callable[[], list[str]],
        devices: Sequence[torch.device],
    ) -> None:
        self.spec = spec
        self.inputs = inputs
        self.n_samples = n_samples
        self.roots = roots
        self.models = models
        self._buffers = buffers
        self.generators = generators
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
        outcome = self._split(size) if is_split else self._whole()
        self.backward.check_ran()
        if is_split and self.before_delivery is not None:
            self.before_delivery(outcome)
        self._deliver()
        return outcome

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
        returned = spec.fn(self.inputs.whole())
        if callable(spec.loss):
            loss = scalar(spec.loss(returned), "loss() of step()")
            return loss, {ONLY: loss}
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
        """How the batch is split; one sample alone has no statistics, and gets a partner.

        It comes from the chunk before. Where that has only two, a chunk is larger than ``size``, if
        a module is known that can't run on one sample.
        """
        starts = range(0, self.n_samples, size)
        chunks = [Chunk(start, min(size, self.n_samples - start)) for start in starts]
        if self.spec.batchnorm == "refuse" or size == 1 or chunks[-1].length > 1:
            return chunks
        *others, before, last = chunks
        if size > 2:
            return [*others, Chunk(before.start, size - 1), Chunk(last.start - 1, 2)]
        if coupled_modules(self.roots):
            return [*others, Chunk(before.start, size + 1)]
        return chunks

    def forward(self, chunk: Chunk) -> Any:
        """Run the function; the first chunk shows whether a module keeps track of its batches."""
        start, length = chunk
        if start or self.spec.batchnorm == "per_chunk":
            return self.spec.fn(self.inputs.chunk(start, length))
        returned = self.spec.fn(self.inputs.chunk(start, length))
        refuse_coupled(written_modules(self.roots, self._buffers), self.n_samples, length)
        return returned

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
        self.backward.watch(self.inputs.leaves)
        try:
            with without_autocast(self.devices):
                self.inputs.deliver()
        except Exception as error:
            if oom_info(error) is None or not self.inputs.has_graph:
                raise
            raise graph_is_used_up() from error
