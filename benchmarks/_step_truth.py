"""The truth that a prediction is held against: what the allocator gave a step that really ran.

The events of a session are the allocator's own, in order, of the thread that runs the step: on a
CPU that is also the thread of its backward. The step is the first of its model, as a user's first
step is; what torch allocates at a first use and keeps is part of the peak: nothing is taken off.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from benchmarks._training_steps import Step
from tenure._storages import total_bytes
from tenure._torch import allocations, cpu_allocator


@dataclass(frozen=True, slots=True)
class Truth:
    """What one step took.

    Attributes:
        peak_bytes: the most that lived at once, what lived before included.
        baseline_bytes: what lived before: parameters, buffers, inputs, gradients, optimizer state.
        kept_bytes: what lives on after it.
        unseen_bytes: how far the events are from the change of the allocator's own count of live
            bytes, which sees all threads; 0 where the events are the whole truth.
        elapsed_s: how long it took, the session's cost included.
    """

    peak_bytes: int
    baseline_bytes: int
    kept_bytes: int
    unseen_bytes: int
    elapsed_s: float


def true_peak(step: Step, optimizer: Optimizer) -> Truth:
    """Run a step once, for the first time, and see what it allocates.

    Blocks from before are only seen to end if ``cpu_allocator.keep_sizes()`` was called before
    they were made.
    """
    baseline_bytes = total_bytes(living_tensors(step, optimizer))
    gc.collect()
    live_before = cpu_allocator.live_bytes()
    allocations.begin()
    start = time.perf_counter()
    try:
        run(step, optimizer)
    finally:
        elapsed_s = time.perf_counter() - start
        changes = allocations.end()
    assert changes is not None
    unseen = cpu_allocator.live_bytes() - live_before - sum(changes.cpu)
    return Truth(
        peak_bytes=baseline_bytes + max(accumulate(changes.cpu, initial=0)),
        baseline_bytes=baseline_bytes,
        kept_bytes=sum(changes.cpu),
        unseen_bytes=unseen,
        elapsed_s=elapsed_s,
    )


def run(step: Step, optimizer: Optimizer) -> None:
    """Forward, backward and the optimizer's step; the loss lives until all is done."""
    loss = step.fn(*step.args)
    if loss.requires_grad:
        loss.backward()
    optimizer.step()


def living_tensors(step: Step, optimizer: Optimizer) -> Iterator[Tensor]:
    """What a step finds: the model's tensors, its batch, gradients and the optimizer's state."""
    parameters = list(step.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    leaves = tree_leaves((step.args, list(optimizer.state.values())))
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return chain(parameters, step.model.buffers(), gradients, tensors)
