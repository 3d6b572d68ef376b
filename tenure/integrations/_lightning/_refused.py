"""What a fit with an `AdaptiveMixin` refuses before the first batch, by name."""

from __future__ import annotations

import inspect
from typing import Any

from tenure._errors import AdaptiveUsageError

MARK = "_tenure_wrapped"
"""What a method that AdaptiveMixin has wrapped has."""
_OWN_OPTIONS = frozenset({"scaler", "backward", "context", "has_aux"})


def options_of(module: Any) -> dict[str, Any]:
    """Return the arguments of `step` that a module declares."""
    return dict(getattr(module, "adaptive_options", ()))


def check_fit(module: Any) -> None:
    """Make sure that the `training_step` of a module can run in micro-batches under its trainer.

    Raises:
        AdaptiveUsageError: it can't.
    """
    name, strategy = type(module).__name__, module.trainer.strategy
    own = sorted(_OWN_OPTIONS & options_of(module).keys())
    if own:
        raise AdaptiveUsageError(
            f"adaptive_options of {name} has {', '.join(own)}, which AdaptiveMixin gives to step() "
            "itself: Lightning's precision and its accumulation of gradients decide. Leave that "
            "out."
        )
    if not module.automatic_optimization:
        raise AdaptiveUsageError(
            f"{name} is an AdaptiveMixin and has automatic_optimization=False: its training_step "
            "runs backward and optimizers itself, so it can't run again. Leave AdaptiveMixin out, "
            "and in training_step, in place of self.manual_backward(loss), call tenure.adaptive."
            "step(loss_of, batch, backward=self.manual_backward), once for each loss."
        )
    # torch.compile() has put its own in the place of the one with the mark
    if not module._compiler_ctx and not hasattr(module.training_step, MARK):
        raise AdaptiveUsageError(
            f"{name}.training_step was set after its class was made, and AdaptiveMixin does not "
            "see it. Define it in the class."
        )
    # by name: the libraries have a class each
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    if "SingleDeviceStrategy" not in kinds:
        raise AdaptiveUsageError(
            f"{name} is an AdaptiveMixin, and the Trainer uses {kinds[0]}: ranks that split their "
            "batches differently would wait for each other, or get wrong gradients. Nothing was "
            'trained. Use one device, Trainer(strategy="auto", devices=1), or leave AdaptiveMixin '
            "out."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise AdaptiveUsageError(
            f"{name}.training_step() takes the iterator of its data loader, which gives each batch "
            "once, so it can't run again. Take (self, batch, batch_idx), or leave AdaptiveMixin "
            "out."
        )
