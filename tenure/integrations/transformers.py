"""A Trainer of transformers whose steps fit, and a callback that watches its memory.

Invariant: what a Trainer computes, logs and counts is what it would without memory running out; and
nothing of the library itself is changed, only methods of the trainer's own objects while they run.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenure._containers import mapped
from tenure._errors import AdaptiveUsageError, RemoteRankError, SplitMismatchError
from tenure._extras import install_command, require_new_enough
from tenure.adaptive import StepResult, is_oom

require_new_enough("transformers")
try:
    from transformers import Trainer

    from ._joined import BatchPart, NumberRules, StepEvent
    from ._transformers import (
        Batch,
        LossOfBatch,
        MemoryCallback,
        PredictionInPieces,
        UncuttableError,
        losses_taken,
        mismatch_of,
        only_loss,
        outputs_taken,
        refuse_class,
        refuse_training,
        ways_of,
        weights_of,
    )
    from .accelerate import step
except ImportError as error:
    raise ImportError(
        "tenure.integrations.transformers needs transformers and accelerate, and one of them can't "
        f"be imported ({error}). Install both with: {install_command('transformers')}."
    ) from error

# the mixin stands before a Trainer of the user's choice, and is none itself
if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["AdaptiveTrainer", "AdaptiveTrainerMixin", "MemoryCallback"]
# the options that say how a loss adds up; with one of them nothing is found out
_REDUCTION = frozenset({"loss", "weight", "then"})
# those that make a loss, or add to one, after `compute_loss`
_MAKERS = ("loss", "then", "once")
_NOT_CUT = "The batch was not cut into pieces. "
_PILED_UP = (
    "The outputs of an evaluation pile up on the device. Bring them to the host with "
    "eval_accumulation_steps=1, make them smaller with preprocess_logits_for_metrics=, or keep "
    "numbers alone with batch_eval_metrics=True."
)
_OF_RANKS = (
    "Ranks exchange counts of labels in each prediction step, so that one with pieces would wait "
    "for the others. Evaluate with a per_device_eval_batch_size that fits on each."
)


def _computes_in_tf32(model: nn.Module, device: torch.device) -> bool:
    """Return whether products of float32 may be rounded to TF32; CUDA's convolutions are."""
    # functions without a backend's name raise after a setting of one
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return True
    has_convolution = any(isinstance(each, nn.modules.conv._ConvNd) for each in model.modules())
    cudnn: Any = torch.backends.cudnn
    return device.type == "cuda" and has_convolution and cudnn.conv.fp32_precision == "tf32"


class AdaptiveTrainerMixin(_Base):
    """Makes the steps of a Trainer fit: ``class MyTrainer(AdaptiveTrainerMixin, Seq2SeqTrainer)``.

    Attributes:
        adaptive_options: options of `tenure.adaptive.step`, such as ``{"minimum": 2}``; set it on
            the class or on the trainer.
        adaptive_result: the result of the last training step.

    Raises:
        AdaptiveUsageError: when the training begins, for these:
            ``auto_find_batch_size=True``, because it restarts the training;
            LOMO, AdaLOMO, ``galore_*_layerwise`` and ``apollo_*_layerwise``, because they update in
            the backward pass, which cannot be undone;
            ``torch.nn.DataParallel``, because it splits batches itself;
            DeepSpeed, because its engine counts each backward pass as a micro-batch;
            FSDP, because one rank cannot compare a split with the whole;
            model parallelism of SageMaker, and tensor, context and sequence parallelism, because
            ranks that split differently would wait for each other.
    """

    preprocess_logits_for_metrics: Any
    adaptive_options: Mapping[str, Any] = {}
    adaptive_result: StepResult | None = None
    # the way that fitted the loss of this trainer last
    _way: str | None = None
    _loss: LossOfBatch | None = None
    # what the micro-batch that runs logs, and what its loss is a mean over
    _held: BatchPart | None = None
    _weight: Callable[[Any], Any] | None = None
    # what the Trainer multiplies its loss by: 1, or its share in the batches that it accumulates
    _factor = 1.0
    _prediction: PredictionInPieces | None = None
    # what the evaluation that runs does to logits
    _preprocess: Callable[[Any, Any], Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_class(cls, AdaptiveTrainerMixin)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, after refusing models that can't be made to fit.

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
        """Run a training step as the Trainer does, in micro-batches if necessary."""
        training_step = super().training_step
        # with these, the loss is not what `compute_loss` returns
        makers = [name for name in _MAKERS if callable(self.adaptive_options.get(name))]

        def loss_of(batch: dict[str, Any]) -> tuple[Tensor, BatchPart]:
            held = BatchPart()

            def run() -> None:
                # a copy, for a trainer may take labels out of it
                training_step(model, copy.copy(batch), *args, **kwargs)

            try:
                self._held = held
                if makers:
                    loss, self._factor = outputs_taken(self, run)
                else:
                    loss = only_loss(losses_taken(self.accelerator, run), self)
                    held.loss = loss.detach()
            finally:
                self._held = None
            if makers == ["once"]:
                loss = loss * self._factor
            if held.events and self._weight is not None:
                with torch.no_grad():
                    held.weight = self._weight(batch)
            return loss, held

        # before the step looks for modules that mix samples, which they do in this mode
        _switch_to_training(model, self.optimizer)
        n_items = kwargs.get("num_items_in_batch", args[0] if args else None)
        if self._loss is None:
            self._loss = LossOfBatch(f"{type(self).__name__}.training_step")
        with self._loss.being(loss_of):
            result = self._step(self._loss, model, inputs, has_n_items=n_items is not None)
        # without what belongs to the batch alone
        self.adaptive_result = replace(result, aux=())
        for callback in self._memory_callbacks():
            callback.adaptive_result = self.adaptive_result
        for event in self._loss.joined_logs(result):
            others, named = event.how
            self.log(event.value, *others, **named)
        return result.loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does; a batch that does not fit is predicted in pieces."""
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
        """Predict as the Trainer does, in pieces if necessary."""
        prediction_step = super().prediction_step

        def predict(batch: Any, loss_only: bool = prediction_loss_only) -> tuple[Any, Any, Any]:
            loss, logits, labels = prediction_step(model, batch, loss_only, ignore_keys, **kwargs)
            if self._preprocess is not None and logits is not None:
                logits = self._preprocess(logits, labels)
            return loss, logits, labels

        if self.args.world_size > 1:
            with _noting(_NOT_CUT + _OF_RANKS):
                return predict(inputs)
        if self._prediction is None:
            self._prediction = PredictionInPieces(f"{type(self).__name__}.prediction_step")
        in_dims = self.adaptive_options.get("in_dims", 0)
        try:
            batch = Batch(inputs, in_dims)
        except UncuttableError as error:
            with _noting(f"{_NOT_CUT}{error}"):
                return predict(inputs)

        def types() -> set[torch.dtype]:
            found = {parameter.dtype for parameter in model.parameters()}
            is_rough = self.accelerator.mixed_precision != "no"
            if torch.float32 in found:
                is_rough = is_rough or _computes_in_tf32(model, self.args.device)
            return found | {torch.bfloat16} if is_rough else found

        weights = functools.partial(weights_of, self, inputs, in_dims)
        outputs = self._prediction(predict, batch, weights, types)
        # outputs of batches pile up in one place; with one that is emptied each time, on the host
        if self.args.eval_accumulation_steps == 1:
            return outputs
        with _noting(_PILED_UP):
            back: tuple[Any, Any, Any] = mapped(lambda t: t.to(self.args.device), outputs)
        return back

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, with the figures of `MemoryCallback`, for all callbacks.

        Inside of `compute_loss` it is told when the step has worked, once for the batch.
        """
        if self._held is not None:
            self._held.events.append(StepEvent("log", tuple(logs), dict(logs), (args, kwargs)))
            return
        for callback in self._memory_callbacks():
            callback.add_to(logs)
        super().log(logs, *args, **kwargs)

    def _step(
        self,
        loss_of: LossOfBatch,
        model: nn.Module,
        inputs: Any,
        *,
        has_n_items: bool,
    ) -> StepResult:
        options = {"context": self, "model": model, "has_aux": True, **self.adaptive_options}
        options |= {n: self._scaled(options[n]) for n in _MAKERS if callable(options.get(n))}
        self._weight = options.get("weight")
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
        mismatches: dict[str, SplitMismatchError] = {}
        for name in names:
            self._weight = ways[name].get("weight")
            try:
                result = step(self.accelerator, loss_of, inputs, **options, **ways[name])
            except SplitMismatchError as error:
                mismatches[name] = error
                # learned with weights that were wrong
                loss_of.rules = NumberRules()
            except RemoteRankError as error:
                # the rank that has split has found out; all try the next way together
                kind = error.cause.partition(":")[0]
                if not kind.endswith(SplitMismatchError.__name__) or name == names[-1]:
                    raise
            else:
                self._way = name
                return result
        raise mismatch_of(type(self).__name__, mismatches)

    def _scaled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function whose result the Trainer's division has reached."""

        @functools.wraps(function)
        def scaled(*args: Any) -> Tensor:
            return function(*args) * self._factor

        return scaled

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


@contextmanager
def _noting(text: str) -> Iterator[None]:
    """Open a block whose errors of memory have a note."""
    try:
        yield
    except Exception as error:
        if is_oom(error):
            error.add_note(text)
        raise
