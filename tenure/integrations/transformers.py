"""A Trainer of transformers whose steps fit, and a callback that watches its memory.

Invariant: what a Trainer computes, logs and counts is what it would without memory running out; and
nothing of the library itself is changed, only methods of the trainer's own objects while they run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError, SplitMismatchError
from tenure.adaptive import StepResult, is_oom

from .accelerate import step

try:
    from transformers import Trainer

    from ._transformers import (
        Batch,
        LossOfBatch,
        MemoryCallback,
        Predict,
        PredictionInPieces,
        Uncut,
        losses_taken,
        on_device,
        only,
        refuse_class,
        refuse_training,
        ways_of,
        weights_of,
    )
except ImportError as error:
    raise ImportError(
        "tenure.integrations.transformers needs transformers and accelerate, and one of them can't "
        f"be imported ({error}). Install both with: pip install 'tenure[transformers]'."
    ) from error

# the mixin stands before a Trainer of the user's choice, and is none itself
if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["AdaptiveTrainer", "AdaptiveTrainerMixin", "MemoryCallback"]
# What says how a loss adds up; where the user says it, nothing is found out.
_REDUCTION = frozenset({"loss", "weight", "then"})
_TRIED = (
    "AdaptiveTrainer tried the loss as a sum that num_items_in_batch divides, as a mean over valid "
    "labels, and as a mean over samples. Say what training_step() computes with adaptive_options: "
    'loss="sum", or weight= for what its mean divides by.'
)


_OF_RANKS = (
    "Ranks exchange counts of labels in each prediction step, so that one with pieces would wait "
    "for the others. Evaluate with a per_device_eval_batch_size that fits on each."
)


class AdaptiveTrainerMixin(_Base):
    """Makes the steps of a Trainer fit: ``class MyTrainer(AdaptiveTrainerMixin, Seq2SeqTrainer)``.

    Attributes:
        adaptive_options: options of `tenure.adaptive.step`, such as ``{"minimum": 2}``; set it on
            the class or on the trainer.
        adaptive_result: what the last training step did.
    """

    preprocess_logits_for_metrics: Any
    adaptive_options: Mapping[str, Any] = {}
    adaptive_result: StepResult | None = None
    # the way that fitted the loss of this trainer last
    _way: str | None = None
    _loss: LossOfBatch | None = None
    _prediction: PredictionInPieces | None = None
    # what an evaluation that runs does to logits
    _preprocess: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_class(cls, AdaptiveTrainerMixin)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, after what can't be made to fit is refused.

        Raises:
            AdaptiveUsageError: the trainer is one of those that the page on transformers names.
        """
        refuse_training(self)
        try:
            return super().train(*args, **kwargs)
        except Exception as error:
            for callback in self._memory_callbacks():
                callback.died(error)
            raise

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """As the Trainer's, in micro-batches if need be."""
        training_step = super().training_step

        def loss_of(batch: dict[str, Any]) -> Tensor:
            with losses_taken(self.accelerator) as losses:
                # a copy, for a trainer may take labels out of it
                training_step(model, copy.copy(batch), *args, **kwargs)
            return only(losses, self)

        # before the step looks for modules that mix samples, which they do in this mode
        _switch_to_training(model, self.optimizer)
        n_items = kwargs.get("num_items_in_batch", args[0] if args else None)
        if self._loss is None:
            self._loss = LossOfBatch(f"{type(self).__name__}.training_step")
        with self._loss.being(loss_of):
            result = self._step(self._loss, model, inputs, has_n_items=n_items is not None)
        self.adaptive_result = result
        for callback in self._memory_callbacks():
            callback.adaptive_result = result
        return result.loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a batch that does not fit is predicted in pieces."""
        if self._prediction is not None:
            self._prediction.forget()
        given = self.preprocess_logits_for_metrics
        # run for each piece, where it is: logits of the whole batch need never be there. Ranks pad
        # outputs to one another before it, so there it stays where it was.
        if self.args.world_size == 1:
            self._preprocess, self.preprocess_logits_for_metrics = given, None
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._preprocess, self.preprocess_logits_for_metrics = None, given

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """As the Trainer's, in pieces if need be."""
        prediction_step = super().prediction_step

        def predict(batch: Any, loss_only: bool = prediction_loss_only) -> tuple[Any, Any, Any]:
            loss, logits, labels = prediction_step(model, batch, loss_only, ignore_keys, **kwargs)
            if self._preprocess is not None and logits is not None:
                logits = self._preprocess(logits, labels)
            return loss, logits, labels

        if self.args.world_size > 1:
            return _whole(predict, inputs, _OF_RANKS)
        if self._prediction is None:
            self._prediction = PredictionInPieces(f"{type(self).__name__}.prediction_step")
        in_dims = self.adaptive_options.get("in_dims", 0)
        try:
            batch = Batch(inputs, in_dims)
        except Uncut as error:
            return _whole(predict, inputs, str(error))
        outputs = self._prediction(predict, batch, inputs, weights_of(self, inputs, in_dims))
        # outputs of batches pile up in one place; with one that is emptied each time, on the host
        if self.args.eval_accumulation_steps == 1:
            return outputs
        return _back(outputs, self.args.device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with what its `MemoryCallback` tells; so all other callbacks see it."""
        for callback in self._memory_callbacks():
            callback.add_to(logs)
        super().log(logs, *args, **kwargs)

    def _step(
        self,
        loss_of: Callable[[Any], Tensor],
        model: nn.Module,
        inputs: Any,
        *,
        has_n_items: bool,
    ) -> StepResult:
        options = {"context": self, "model": model, **self.adaptive_options}
        if _REDUCTION & options.keys():
            return step(self.accelerator, loss_of, inputs, **options)
        if not options.get("verify", True):
            # many models take num_items_in_batch and divide by their own count all the same
            raise AdaptiveUsageError(
                f"{type(self).__name__}.adaptive_options has verify=False and does not say how the "
                "loss adds up, which is found out by verifying. Say it with loss= or weight=, or "
                "leave verify=False out."
            )
        ways = ways_of(self, inputs, has_n_items=has_n_items)
        # the last one first: that of another batch is told from it only where it differs
        names = sorted(ways, key=lambda name: name != self._way)
        first: SplitMismatchError | None = None
        for name in names:
            try:
                result = step(self.accelerator, loss_of, inputs, **options, **ways[name])
            except SplitMismatchError as error:
                first = first or error
            else:
                self._way = name
                return result
        assert first is not None
        first.add_note(_TRIED)
        raise first

    def _memory_callbacks(self) -> list[MemoryCallback]:
        callbacks = self.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, MemoryCallback)]


class AdaptiveTrainer(AdaptiveTrainerMixin, Trainer):
    """The Trainer of transformers, with training steps and evaluation that fit."""


def _switch_to_training(model: nn.Module, optimizer: Any) -> None:
    model.train()
    # of optimizers without schedules, which keep other weights for evaluation
    if callable(train := getattr(optimizer, "train", None)):
        train()


def _whole(predict: Predict, inputs: Any, reason: str) -> tuple[Any, Any, Any]:
    try:
        return predict(inputs)
    except Exception as error:
        if is_oom(error):
            error.add_note(f"The batch was not cut into pieces. {reason}")
        raise


def _back(outputs: tuple[Any, Any, Any], device: torch.device) -> tuple[Any, Any, Any]:
    try:
        loss, logits, labels = on_device(outputs, device)
    except Exception as error:
        if is_oom(error):
            error.add_note(
                "The outputs of an evaluation pile up on the device. Bring them to the host with "
                "eval_accumulation_steps=1, make them smaller with preprocess_logits_for_metrics=, "
                "or keep numbers alone with batch_eval_metrics=True."
            )
        raise
    return loss, logits, labels
