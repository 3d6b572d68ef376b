"""A training step that fits, in a loop of Hugging Face accelerate.

Invariant: nothing of the accelerator is changed, and what it does besides running backward (its
mixed precision, its accumulation, clipping, its optimizers and schedulers) stays with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tenure._extras import install_command, require_new_enough
from tenure.adaptive import AdaptiveUsageError, StepResult
from tenure.adaptive import step as adaptive_step

# by the metadata of the package, because this module does not import the library
require_new_enough("accelerate")
Batch = TypeVar("Batch")

_BACKENDS = {
    "DEEPSPEED": "whose backward() keeps gradients to itself and calls the optimizer",
    "MEGATRON_LM": "whose model runs forward and backward by itself",
    "XLA": "which runs nothing before the end of the step, so that memory runs out after it",
}
"""What accelerate can run on and a step can't, by the name of its distributed type, and why."""
_SHARED_SAMPLES = {
    "tp_size": "tensor parallelism", "cp_size": "context parallelism",
    "sp_size": "sequence parallelism",
}  # fmt: skip
"""Ways to share the work of one sample, by what a ParallelismConfig calls the ranks."""


def step(accelerator: Any, fn: Callable[[Batch], Any], batch: Batch, **options: Any) -> StepResult:
    """Run forward and backward by `tenure.adaptive.step`, backward by ``accelerator.backward``.

    It stands where a loop has its forward pass and ``accelerator.backward(loss)``, inside of
    ``with accelerator.accumulate(model)`` too: gradients are divided by
    ``gradient_accumulation_steps`` and multiplied by the scale of float16, each once. Clipping, the
    optimizer and the scheduler stay as they are.

    Args:
        accelerator: the ``accelerate.Accelerator`` that has prepared the model.
        fn: as for `tenure.adaptive.step`.
        batch: likewise.
        **options: its other arguments, but ``backward`` and ``scaler``; ``per_rank`` is true here
            unless it is given, so that gradients of several ranks are averaged as before.

    Returns:
        The loss, which is not divided, and how the batch was split.

    Raises:
        AdaptiveUsageError: the accelerator runs on a backend that can't take back an attempt or
            share out a batch; or as for `tenure.adaptive.step`, and so for its other errors.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from tenure.integrations.accelerate import step
        >>> net = torch.nn.Linear(4, 1)
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        >>> result = step(accelerator, lambda x: model(x).square().mean(), torch.randn(8, 4))
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    _check(accelerator, options)
    # as in the loop without it, where each rank has a loss of its own and gradients are averaged
    named = {"per_rank": True, **options}
    return adaptive_step(fn, batch, backward=accelerator.backward, **named)


def _check(accelerator: Any, options: dict[str, Any]) -> None:
    """Make sure that the step is one that accelerate can take in parts.

    Raises:
        AdaptiveUsageError: it is not.
    """
    # by what is used of it, so that nothing is imported that the loop has not
    backend = getattr(accelerator, "distributed_type", None)
    if backend is None or not callable(getattr(accelerator, "backward", None)):
        raise AdaptiveUsageError(
            f"step() got a {type(accelerator).__name__} as accelerator. Pass the "
            "accelerate.Accelerator that has prepared the model, which comes with: "
            f"{install_command('accelerate')}."
        )
    for name in ("backward", "scaler"):
        if name in options:
            raise AdaptiveUsageError(
                f"step() got {name}=, which the accelerator has: it runs backward and scales. "
                f"Leave it out, or call tenure.adaptive.step() without an accelerator."
            )
    kind = str(getattr(backend, "value", backend))
    if kind in _BACKENDS:
        raise _refused(f"{kind}, {_BACKENDS[kind]}")
    if getattr(accelerator, "has_lomo_optimizer", False):
        raise _refused("a LOMO optimizer, which updates parameters in the backward pass")
    # its scales are made of the largest values of whole batches, and stand in no buffer
    if getattr(accelerator, "mixed_precision", "no") == "fp8":
        raise _refused("fp8, whose scales are made of the largest values of whole batches")
    parallel = getattr(accelerator, "parallelism_config", None)
    for size, what in _SHARED_SAMPLES.items():
        if (getattr(parallel, size, None) or 1) > 1:
            raise _refused(f"{what}, whose ranks wait for each other in the forward pass")


def _refused(what: str) -> AdaptiveUsageError:
    return AdaptiveUsageError(
        f"step() can't run with {what}: an attempt that ran out of memory could not be taken back "
        "or divided, or not on this rank alone. Nothing was run. Use the accelerator's own "
        "backward(), with a batch that fits."
    )
