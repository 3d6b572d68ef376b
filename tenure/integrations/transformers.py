"""A Trainer of transformers whose steps fit, and a callback that watches its memory.

Invariant: what a Trainer computes, logs and counts is what it would without memory running out; and
nothing of the library itself is changed, only methods of the trainer's own objects while they run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenure._errors import AdaptiveUsageError, SplitMismatchError
from tenure.adaptive import StepResult, is_oom, step

from ._prediction import Batch, Predict, PredictionInPieces, Uncut, Weight, on_device

try:
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from ._transformers_callback import MemoryCallback
    from ._transformers_refused import refuse_training
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
_IGNORED = -100
# What says how a loss adds up; where the user says it, nothing is found out.
_REDUCTION = frozenset({"loss", "weight", "then"})
_TRIED = (
    "AdaptiveTrainer tried the loss as a sum that num_items_in_batch divides, as a mean over valid "
    "labels, and as a mean over samples. Say what training_step() computes with step_options: "
    'loss="sum", or weight= for what its mean divides by.'
)


class AdaptiveTrainerMixin(_Base):
    """Makes the steps of a Trainer fit: ``class MyTrainer(AdaptiveTrainerMixin, Seq2SeqTrainer)``.

    Attributes:
        step_options: options of `tenure.adaptive.step`, such as ``{"minimum": 2}``; set it on the
            class or on the trainer.
        step_result: what the last training step did.
    """

    preprocess_logits_for_metrics: Any
    step_options: Mapping[str, Any] = {}
    step_result: StepResult | None = None
    # the way that fitted the loss of this trainer last
    _way: str | None = None
    _loss: _LossOfBatch | None = None
    _prediction: PredictionInPieces | None = None
    # what an evaluation that runs does to logits
    _preprocess: Any = None

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
            with _losses_of(self.accelerator) as losses:
                # a copy, for a trainer may take labels out of it
                training_step(model, copy.copy(batch), *args, **kwargs)
            return _only(losses, self)

        # before the step looks for modules that mix samples, which they do in this mode
        _switch_to_training(model, self.optimizer)
        n_items = kwargs.get("num_items_in_batch", args[0] if args else None)
        if self._loss is None:
            self._loss = _LossOfBatch(f"{type(self).__name__}.training_step")
        with self._loss.being(loss_of):
            result = self._step(self._loss, model, inputs, has_n_items=n_items is not None)
        self.step_result = result
        for callback in self._memory_callbacks():
            callback.step_result = result
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

        if self._prediction is None:
            self._prediction = PredictionInPieces(f"{type(self).__name__}.prediction_step")
        try:
            batch = Batch(inputs, self.step_options.get("in_dims", 0))
        except Uncut as error:
            return _whole(predict, inputs, str(error))
        outputs = self._prediction(predict, batch, inputs, _weights(self, inputs))
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
        options = {"context": self, "model": model, "scaler": self.accelerator.scaler}
        options |= self.step_options
        if _REDUCTION & options.keys():
            return step(loss_of, inputs, **options)
        if not options.get("verify", True):
            # many models take num_items_in_batch and divide by their own count all the same
            raise AdaptiveUsageError(
                f"{type(self).__name__}.step_options has verify=False and does not say how the "
                "loss adds up, which is found out by verifying. Say it with loss= or weight=, or "
                "leave verify=False out."
            )
        ways = _ways(self, inputs, has_n_items=has_n_items)
        # the last one first: that of another batch is told from it only where it differs
        names = sorted(ways, key=lambda name: name != self._way)
        first: SplitMismatchError | None = None
        for name in names:
            try:
                result = step(loss_of, inputs, **options, **ways[name])
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


class _LossOfBatch:
    """The function of all steps of one trainer, so that each is known to be the same work.

    Args:
        name: what errors and events call it.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    @contextmanager
    def being(self, loss_of: Callable[[Any], Tensor]) -> Iterator[None]:
        """A block in which it is a function, which it does not hold afterwards."""
        self._loss_of = loss_of
        try:
            yield
        finally:
            del self._loss_of

    def __call__(self, batch: Any) -> Tensor:
        # Not by its name: whoever searches a step for modules follows names, and a trainer leads to
        # data sets and the state of optimizers. The modules are given, or seen when they run.
        loss: Tensor = vars(self)["_loss_of"](batch)
        return loss


@contextmanager
def _losses_of(accelerator: Any) -> Iterator[list[Tensor]]:
    """A block in which an accelerator takes losses down, and runs none of them backward."""
    before, losses = vars(accelerator).get("backward"), []
    accelerator.backward = lambda loss, **_: losses.append(loss)
    try:
        yield losses
    finally:
        del accelerator.backward
        if before is not None:
            accelerator.backward = before


def _only(losses: list[Tensor], trainer: Trainer) -> Tensor:
    if len(losses) != 1:
        raise AdaptiveUsageError(
            f"{type(trainer).__name__}.training_step() called accelerator.backward() "
            f"{len(losses)} times, so there is no one loss to split. Let it call that once for "
            "each batch, or train with a Trainer that is not adaptive."
        )
    return losses[0]


def _switch_to_training(model: nn.Module, optimizer: Any) -> None:
    model.train()
    # of optimizers without schedules, which keep other weights for evaluation
    if callable(train := getattr(optimizer, "train", None)):
        train()


# --- how the loss of a batch adds up from those of its parts


def _ways(trainer: Trainer, inputs: Any, *, has_n_items: bool) -> dict[str, dict[str, Any]]:
    """What a loss may be, the likeliest first; `step` tells which of them it is not."""
    total = {"sum": {"loss": "sum"}}
    means: dict[str, dict[str, Any]] = {}
    if _has_labels_to_count(inputs):
        likely, other = (1, 0) if _shifts_labels(trainer) else (0, 1)
        for shift in (likely, other):
            means[f"valid labels from {shift}"] = {"weight": _counting(shift)}
    means["samples"] = {}
    # what divides by the count of all batches is a sum of each; a loss may not use that count
    return total | means if has_n_items else means | total


def _has_labels_to_count(inputs: Any) -> bool:
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    if not isinstance(labels, Tensor) or not labels.dim():
        return False
    return not (labels.is_floating_point() or labels.is_complex())


def _shifts_labels(trainer: Trainer) -> bool:
    # told by the trainer since 5.8; before, and for its label smoother, by the name of the model
    told = getattr(trainer, "_loss_shifts_labels", False)
    return told or type(trainer.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _counting(shift: int) -> Callable[[Any], Tensor]:
    def n_valid(batch: Any) -> Tensor:
        labels: Tensor | None = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"]
            assert labels is not None
            labels = labels[..., shift:] if labels.dim() > 1 else labels
        return labels.ne(_IGNORED).sum()

    return n_valid


# --- evaluation


def _weights(trainer: Trainer, inputs: Any) -> dict[str, Weight | None]:
    """What the loss of an evaluation may be a mean over."""
    weights: dict[str, Weight | None] = {}
    # what each version divides by; of several ranks it would be the count of all
    count, device = getattr(trainer, "_get_num_items_in_batch", None), trainer.args.device
    if count and trainer.args.world_size == 1 and count([inputs], device) is not None:
        weights["items"] = lambda part: count([part], device)
    ways = _ways(trainer, inputs, has_n_items=False)
    return weights | {
        name: None if "loss" in way else way.get("weight", _n_samples) for name, way in ways.items()
    }


def _n_samples(batch: Any) -> int:
    return next(len(each) for each in batch.values() if isinstance(each, Tensor) and each.dim())


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
