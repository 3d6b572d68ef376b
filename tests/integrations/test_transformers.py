import gc
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, SplitMismatchError, memory_budget

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
from transformers import (  # noqa: E402
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tenure.integrations.transformers import (  # noqa: E402
    AdaptiveTrainer,
    AdaptiveTrainerMixin,
    MemoryCallback,
)

transformers.logging.set_verbosity_error()
_WORDS, _LENGTH = 32, 12
# each without dropout, whose masks are others in other pieces
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
_BERT = BertConfig(
    vocab_size=_WORDS, num_attention_heads=2, num_labels=3, **_SMALL,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Each training begins with a collection of garbage, which need not look at what is imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _alone():
    adaptive.reset()
    yield
    adaptive.reset()


@pytest.fixture
def events():
    found = []
    adaptive.add_listener(found.append)
    yield found
    adaptive.remove_listener(found.append)


def llama(**kwargs):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_WORDS, num_attention_heads=2, bos_token_id=0, eos_token_id=1,
        max_position_embeddings=64, **(_SMALL | kwargs),
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=_WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=_LENGTH,
        bos_token_id=0, eos_token_id=1, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def bert(kind):
    torch.manual_seed(0)
    return kind(_BERT).double()


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=_WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).double()


def texts(n=64, length=_LENGTH):
    """Samples with other numbers of labels that count; some with hardly any."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(n):
        words = torch.randint(2, _WORDS, (length,), generator=generator)
        labels = words.clone()
        labels[: int(torch.randint(0, length - 1, (1,), generator=generator))] = -100
        mask = torch.ones(length, dtype=torch.long)
        samples.append({"input_ids": words, "attention_mask": mask, "labels": labels})
    return samples


def classes(n=64):
    return [{**each, "labels": each["input_ids"][0] % 3} for each in texts(n)]


class Run:
    """A trainer that has trained, and what it told."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.parameters = [p.detach().clone() for p in trainer.model.parameters()]
        history = trainer.state.log_history
        self.losses = [each["loss"] for each in history if "loss" in each]
        self.norms = [each["grad_norm"] for each in history if "loss" in each]

    def assert_same(self, other, tolerance=1e-9):
        assert len(self.losses) == len(other.losses)
        # the Trainer adds losses up in float32
        np.testing.assert_allclose(self.losses, other.losses, rtol=max(tolerance, 1e-6))
        np.testing.assert_allclose(self.norms, other.norms, rtol=max(tolerance, 1e-6))
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def trainer_of(
    kind, folder, model, data, *, steps=3, batch=16, options=None, callbacks=(), arguments=None,
    args_kind=TrainingArguments, **kwargs,
):  # fmt: skip
    settings = {"report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    settings |= {"max_steps": steps, "per_device_train_batch_size": batch, "use_cpu": True}
    args = args_kind(str(folder), **(settings | (arguments or {})))
    trainer = kind(model, args, train_dataset=data, callbacks=list(callbacks), **kwargs)
    trainer.remove_callback(PrinterCallback)
    if options is not None:
        trainer.step_options = options
    return trainer


def trained(*args, resume=None, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return Run(trainer)


# --- a third of the memory


@pytest.mark.parametrize(
    "model", [gpt2, pytest.param(llama, marks=pytest.mark.slow)], ids=["gpt2", "llama"]
)
def test_a_third_of_the_memory_trains_the_same_model(tmp_path, events, model):
    with memory_budget("1GiB") as unlimited:
        plain = trained(Trainer, tmp_path, model(), texts(), steps=20)
    with memory_budget(unlimited.peak_bytes // 3) as limited:
        fitted = trained(AdaptiveTrainer, tmp_path, model(), texts(), steps=20)
    fitted.assert_same(plain, 1e-6)
    assert len(fitted.losses) == fitted.trainer.state.global_step == 20
    assert limited.peak_bytes <= unlimited.peak_bytes // 3
    assert 1 <= len([event for event in events if event.info is not None]) <= 3
    assert fitted.trainer.step_result.micro_batch < 16


# --- every feature, in pieces


def counted_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


def mean_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class MeanOfSamples(Trainer):
    """Each sample counts as much, whatever it has of labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
        loss = (losses.sum(1) / (labels != -100).sum(1)).mean()
        return (loss, outputs) if return_outputs else loss


class UnscaledMeanOfSamples(MeanOfSamples):
    loss_is_scaled_for_ga = False


class Scaled(Trainer):
    """With a scaler of gradients, as fp16 has on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)


def without_loss_kwargs():
    model = llama()
    model.accepts_loss_kwargs = False
    return model


_FEATURES = {
    "accumulation": (Trainer, llama, texts, {"gradient_accumulation_steps": 3}, {}),
    "without a count": (
        Trainer, without_loss_kwargs, texts, {"gradient_accumulation_steps": 2}, {},
    ),
    "masked": (Trainer, lambda: bert(BertForMaskedLM), texts, {}, {}),
    "classes": (Trainer, lambda: bert(BertForSequenceClassification), classes, {}, {}),
    "encoder and decoder": (Trainer, t5, texts, {}, {}),
    "label smoothing": (Trainer, llama, texts, {"label_smoothing_factor": 0.1}, {}),
    "label smoothing without a count": (
        Trainer, without_loss_kwargs, texts, {"label_smoothing_factor": 0.1}, {},
    ),
    "compute_loss_func": (Trainer, llama, texts, {}, {"compute_loss_func": counted_loss}),
    "compute_loss_func without the count": (
        Trainer, llama, texts, {}, {"compute_loss_func": mean_loss},
    ),
    "compute_loss": (MeanOfSamples, llama, texts, {"gradient_accumulation_steps": 2}, {}),
    "compute_loss, scaled": (
        UnscaledMeanOfSamples, llama, texts, {"gradient_accumulation_steps": 2}, {},
    ),
    "scaler": (Scaled, llama, texts, {"max_grad_norm": 0.0}, {}),
    "checkpointing": (Trainer, llama, texts, {"gradient_checkpointing": True}, {}),
    "emptied caches": (Trainer, llama, texts, {"torch_empty_cache_steps": 1}, {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("feature", _FEATURES)
def test_pieces_train_as_the_whole_does(tmp_path, feature):
    kind, model, data, arguments, kwargs = _FEATURES[feature]
    # AdamW makes a step of a rounding error
    both = {"arguments": {"optim": "sgd", **arguments}, "steps": 2, **kwargs}
    adaptive_kind = type("Adaptive", (AdaptiveTrainerMixin, kind), {})
    plain = trained(kind, tmp_path, model(), data(), **both)
    fitted = trained(adaptive_kind, tmp_path, model(), data(), options={"maximum": 5}, **both)
    fitted.assert_same(plain)
    assert fitted.trainer.step_result.sizes == (5, 5, 4, 2)
