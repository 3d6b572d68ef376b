"""What may not run in work that is split or runs again: three kinds, each refused by name.

Modules that mix the samples of a batch, told in two ways: by type, before anything runs; and by a
buffer that a forward pass of the first chunk has written, as running statistics, observers and
power iterations do. Modules that talk to other processes. And optimizers, because what they move
can't be put back; hooks run where autograd runs them: for the CPU on this thread, for a device on
one of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tenure._errors import AdaptiveUsageError, BatchCoupledError
from tenure._text import listed
from tenure._torch.modules import BatchNorm, InstanceNorm

from ..._ranks import has_other_ranks, is_sharded
from ..._reachable import named_modules
from ..._undo import BufferState

# torch has no class for this error, only its text.
_ONE_VALUE = "Expected more than 1 value per channel when training"
"""Part of the text of ``_verify_batch_size`` in torch/nn/functional.py."""


class Coupled(NamedTuple):
    """A module that mixes samples."""

    name: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.why})"


def coupled_modules(roots: Mapping[str, nn.Module]) -> list[Coupled]:
    """Yield the modules that couple samples, by their type and state."""
    found = []
    for name, module in named_modules(roots):
        why = _why_coupled(module)
        if why is not None:
            found.append(Coupled(name, type(module).__name__, why))
    return found


def written_modules(roots: Mapping[str, nn.Module], buffers: BufferState) -> list[Coupled]:
    """Return the modules with a buffer that was written since the buffers were noted."""
    # a module that nobody named, such as a metric beside the model, may count what it likes
    names = {module: name for name, module in named_modules(roots)}
    return [
        Coupled(names[module], type(module).__name__, f"each call updates its buffer {key!r}")
        for module, key in buffers.written()
        if module in names
    ]


def refuse_coupled(found: list[Coupled], n_samples: int, size: int) -> None:
    """Make sure that nothing mixes the samples.

    Raises:
        BatchCoupledError: something does.
    """
    if found:
        raise BatchCoupledError(
            f"The batch of {n_samples} has to be split into micro-batches of {size}, and "
            f"{listed([*map(str, found)], most=6)} would give other results then. Nothing was "
            "changed. Freeze them with eval(), use LayerNorm or GroupNorm, or accept statistics "
            'of each micro-batch with batchnorm="per_chunk".',
            tuple(each.name for each in found),
        )


def wants_more_samples(error: ValueError) -> bool:
    """Return whether a normalization over the samples of a batch got only one, of one value."""
    return _ONE_VALUE in str(error)


def normalization_error(error: ValueError, n_samples: int, size: int) -> BatchCoupledError:
    """Return the error for a function that calls such a normalization itself."""
    return BatchCoupledError(
        f"The batch of {n_samples} has to be split into micro-batches of {size}, and the function "
        f"of step() normalizes over the samples of its batch ({error}), so it would give other "
        "results then. Nothing was changed. Use layer_norm or group_norm, or running statistics "
        "with training=False; or accept statistics of each micro-batch, of 2 or more with "
        'minimum=2 and batchnorm="per_chunk".'
    )


def _why_coupled(module: nn.Module) -> str | None:
    if isinstance(module, BatchNorm):
        if module.training:
            return "training with the statistics of its batch"
        # frozen, it normalizes with constants: see
        # test_batchnorm_may_stay_when_the_batch_fits_or_it_is_frozen
        has_none = module.running_mean is None
        return "without running statistics, so it uses those of its batch" if has_none else None
    # each sample is normalized alone, but running statistics are a mean over the batch
    if isinstance(module, InstanceNorm) and module.training and module.track_running_stats:
        return "training its running statistics"
    return None


def refuse_sharded(roots: Mapping[str, nn.Module], n_samples: int, size: int) -> None:
    """Make sure that a split of this process alone leaves no other waiting.

    Raises:
        AdaptiveUsageError: a module talks to other processes when it runs.
    """
    if not has_other_ranks():
        return
    talking = [
        f"{name} ({type(module).__name__})"
        for name, module in named_modules(roots)
        if is_sharded(module)
    ]
    if talking:
        raise AdaptiveUsageError(
            f"The batch of {n_samples} has to be split into micro-batches of {size} on this rank, "
            f"and {listed(talking, most=6)} asks other ranks for parameters in each forward and "
            "backward pass: ranks that split differently wait for each other. Nothing was changed. "
            "Pass a batch that fits on every rank."
        )


class _OptimizerGuard(NamedTuple):
    """What a block is called, and the identities of what may not move in it; None: anything."""

    name: str
    parameters: Container[int] | None


class _BlocksOfThread(threading.local):
    guard: _OptimizerGuard | None = None


_this_thread = _BlocksOfThread()
# Autograd's own threads, one for each device, see nothing of what `_this_thread` holds.
_guarded: dict[int, _OptimizerGuard] = {}
"""The blocks that are open, by thread."""


@contextmanager
def no_optimizer_steps(name: str, parameters: Container[int] | None = None) -> Iterator[None]:
    """Open a block in which optimizers that step, also in its backward passes, raise.

    Args:
        name: what the error calls the block.
        parameters: the identities of those that may not move; None: no optimizer may step.

    Raises:
        AdaptiveUsageError: in the block, from ``optimizer.step()``, before it changes anything.
    """
    _listen()
    guard = _OptimizerGuard(name, parameters)
    before, _this_thread.guard = _this_thread.guard, guard
    _guarded[threading.get_ident()] = guard
    try:
        yield
    finally:
        _this_thread.guard = before
        # a step inside a step is still inside the outer one, whose guard holds again
        if before is None:
            del _guarded[threading.get_ident()]
        else:
            _guarded[threading.get_ident()] = before


@functools.cache
def _listen() -> None:
    # once and for good: outside of blocks, the hook costs a step of an optimizer one look
    register_optimizer_step_pre_hook(_refuse_inside)


def _refuse_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    guard = _this_thread.guard or _guard_of_backward()
    if guard is not None and _moves(optimizer, guard):
        name = guard.name
        raise AdaptiveUsageError(
            f"{type(optimizer).__name__}.step() was called inside {name}(), which may have to run "
            "its function again: an update can't be taken back. Nothing was updated. Call the "
            f"optimizer after {name}()."
        )


def _moves(optimizer: Optimizer, guard: _OptimizerGuard) -> bool:
    if guard.parameters is None:
        return True
    moved = (each for group in optimizer.param_groups for each in group["params"])
    return any(id(each) in guard.parameters for each in moved)


def _guard_of_backward() -> _OptimizerGuard | None:
    """On a thread of autograd's own, the block that waits for it; of several, the first."""
    # threads of C++ are dummies to Python; a data loader's or a user's are not
    if not _guarded or not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    return next(iter(_guarded.copy().values()), None)
