"""One `training_step` that fits: the step of `adaptive`, between Lightning's own calls.

Lightning drops the gradients of the step before only when `training_step` has returned, and then
runs backward. Invariant: all that it does, and all that it calls, finds gradients, logs and outputs
as if the whole batch had just run forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError, BatchCoupledError, SplitMismatchError
from tenure.adaptive import StepResult, step

from .._joined import BatchPart
from ._deferred import DeferredGradients
from ._metrics import call_metric
from ._recorder import StepRecorder, note_compared, recorder_of
from ._refused import options_of


def is_trained(module: Any) -> bool:
    """Return whether a trainer's training loop is the caller, not a module around this one."""
    trainer = module._trainer
    if trainer is None or not trainer.training or not torch.is_grad_enabled():
        return False
    return trainer.lightning_module is module


def fitting_step(
    module: Any, written: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the `training_step` of a module.

    Args:
        module: the module.
        written: the method as it was written.
        args: the batch, and what else Lightning gives.
        kwargs: the same by name.

    Returns:
        What Lightning wants: the loss of the whole batch, with the rest in a dict if there is more;
        None to skip the batch.
    """
    batch, *others = args
    options = options_of(module)
    recorder = StepRecorder(module, batch, others, kwargs, options)
    _release_old_gradients(module)
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    # asked before the step: a scaler makes its tensors at its first use, and they are no attempt's
    scale = None if scaler is None else scaler.scale(torch.ones((), device=module.device))
    deferred = DeferredGradients(_trained_by(module))
    kind = type(module)

    def made() -> StepResult:
        return step(
            _function_of(module, written),
            batch,
            scaler=scaler,
            context=f"{kind.__module__}.{kind.__qualname__}.training_step",
            has_aux=True,
            **options,
        )

    with _telling_where_to_declare(kind):
        result = recorder.hearing(lambda: deferred.making(made))
    # without what belongs to the batch alone
    module.adaptive_result = replace(result, aux=())
    parts: Sequence[BatchPart] = result.aux
    # sums of micro-batches in half precision are wider than that
    value = result.loss if parts[0].loss is None else result.loss.to(parts[0].loss.dtype)
    is_skipped = recorder.is_skipped(parts)
    extra = {}
    # all that may be refused comes before anything is told
    for event in recorder.told(parts, recorder.joiner(parts, result.sizes, value)):
        if event.kind == "metric":
            call_metric(event)
        elif event.kind == "log":
            module.log(event.name, event.value, **event.how)
        else:
            extra[event.name] = event.value
    if is_skipped:
        return None
    loss = deferred.loss(value, scale)
    return {"loss": loss, **extra} if extra else loss


@contextmanager
def _telling_where_to_declare(kind: type) -> Iterator[None]:
    """Return a block whose errors speak of arguments of `step`, which the user does not call."""
    try:
        yield
    except (AdaptiveUsageError, BatchCoupledError, SplitMismatchError) as error:
        error.add_note(
            f"{kind.__name__} is an AdaptiveMixin: arguments of step() stand in its "
            'adaptive_options, a dict such as {"weight": lambda batch: ...}, what the mean of the '
            'loss divides by. Where classes have weights: {"weight": lambda batch: '
            'class_weights[batch[1]].sum()}; of a sum: {"loss": "sum"}.'
        )
        raise


def _function_of(self: Any, written: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the function of one step.

    It captures what stays the same from step to step, by which `step` knows the place again; and by
    the names that the user's code has.
    """
    compiled = self._compiler_ctx
    function = written if compiled is None else compiled["dynamo_ctx"](written)

    def training_step(batch: Any) -> Any:
        recorder = recorder_of(self)
        assert recorder is not None
        return recorder.run(function, batch)

    # it runs the code of the class and stands for that: its own is one for all classes
    functools.update_wrapper(training_step, written, assigned=(), updated=())
    training_step.__name__ = f"{type(self).__name__}.training_step"
    training_step.on_compared = note_compared  # type: ignore[attr-defined]
    return training_step


def _trained_by(module: Any) -> list[Tensor]:
    """Return the leaves that an optimizer steps, those of the module and others."""
    of_optimizers = (
        leaf
        for optimizer in module.trainer.optimizers
        for group in optimizer.param_groups
        for leaf in group["params"]
    )
    return list({id(leaf): leaf for leaf in chain(module.parameters(), of_optimizers)}.values())


def _release_old_gradients(module: Any) -> None:
    """Drop gradients that Lightning will drop, before new ones stand beside them.

    Unless somebody wants to see them, or drops them in a way of its own.
    """
    trainer = module.trainer
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
        return
    methods = [module.on_before_zero_grad, module.optimizer_zero_grad]
    methods += [callback.on_before_zero_grad for callback in trainer.callbacks]
    if all(_is_of_lightning(method) for method in methods):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()


def _is_of_lightning(method: Any) -> bool:
    """Return whether a hook is the one that does nothing of its own."""
    module = getattr(method, "__module__", "").partition(".")[0]
    return module in ("lightning", "pytorch_lightning")
