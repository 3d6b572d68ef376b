import logging
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure import NewDisposeScope, detach_from_scope, is_disposed, scoped
from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, SplitMismatchError, memory_budget

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

from tenure.integrations.transformers import (  # noqa: E402
    AdaptiveTrainer,
    AdaptiveTrainerMixin,
    MemoryCallback,
)

transformers.logging.set_verbosity_error()
# before accelerate 1.1
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")
_WORDS, _LENGTH = 32, 12
# each without dropout, whose masks are others in other pieces
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
_ENDS = {"bos_token_id": 0, "eos_token_id": 1}


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    # trainers write here
    monkeypatch.chdir(tmp_path)


def made(family, head, **config):
    """A small model in float64."""
    torch.manual_seed(0)
    made_config = getattr(transformers, f"{family}Config")(vocab_size=_WORDS, **config)
    return getattr(transformers, f"{family}{head}")(made_config).double()


def llama():
    settings = {"num_attention_heads": 2, "max_position_embeddings": 64}
    return made("Llama", "ForCausalLM", **_SMALL, **_ENDS, **settings)


def gpt2(dropout=0.0):
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": _LENGTH}
    return made("GPT2", "LMHeadModel", **sizes, **_ENDS, **rates)


def bert():
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {"num_attention_heads": 2, "num_labels": 3}
    return made("Bert", "ForSequenceClassification", **_SMALL, **settings, **rates)


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return made("T5", "ForConditionalGeneration", **sizes, **ends, dropout_rate=0.0)


class Words(nn.Module):
    """As few operations as a model can have, for steps that run dozens of times."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(_WORDS, 16), nn.Linear(16, _WORDS)

    def forward(self, input_ids, attention_mask=None, labels=None, num_items_in_batch=None):
        logits, loss = self.head(self.embed(input_ids).tanh()), None
        if labels is not None:
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            loss = losses.sum() / (
                (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            )
        return CausalLMOutput(loss=loss, logits=logits)


def words():
    torch.manual_seed(0)
    return Words().double()


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


def stacked(samples):
    return {key: torch.stack([each[key] for each in samples]) for key in samples[0]}


def classes(n=64):
    return [{**each, "labels": each["input_ids"][0] % 3} for each in texts(n)]


class Run:
    """A trainer that has trained, and what it told."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.parameters = [p.detach().clone() for p in trainer.model.parameters()]
        self.losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        # without evaluations, and without what the last one says of the time that all took
        steps = [each for each in trainer.state.log_history if "eval_loss" not in each]
        self.logged = [
            {key: each[key] for key in each if not key.startswith(("train_", "total_"))}
            for each in steps
        ]

    def assert_same(self, other, tolerance=1e-9):
        # the Trainer adds losses up in float32
        for mine, theirs in zip(self.logged, other.logged, strict=True):
            assert mine == pytest.approx(theirs, rel=max(tolerance, 1e-6))
        tolerances = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(self.parameters, other.parameters, **tolerances)


def trainer_of(
    kind, model, data, *, steps=3, batch=16, options=None, callbacks=(), arguments=None,
    args_kind=TrainingArguments, **kwargs,
):  # fmt: skip
    settings = {"report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    settings |= {"max_steps": steps, "per_device_train_batch_size": batch, "use_cpu": True}
    args = args_kind(".", **(settings | (arguments or {})))
    trainer = kind(model, args, train_dataset=data, callbacks=list(callbacks), **kwargs)
    trainer.remove_callback(transformers.PrinterCallback)
    if options is not None:
        trainer.adaptive_options = options
    return trainer


def trained(*args, resume=None, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return Run(trainer)


def full(most):
    """A hook of a module on a device for so many samples."""

    def refuse(module, args, kwargs):
        if most is not None and len(kwargs["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return refuse


def test_a_third_of_the_memory_trains_the_same_model(events):
    with memory_budget("1GiB") as unlimited:
        plain = trained(Trainer, gpt2(), texts(), steps=20)
    with memory_budget(unlimited.peak_bytes // 3) as limited:
        fitted = trained(AdaptiveTrainer, gpt2(), texts(), steps=20)
    fitted.assert_same(plain, 1e-6)
    assert len(fitted.losses) == fitted.trainer.state.global_step == 20
    assert limited.peak_bytes <= unlimited.peak_bytes // 3
    assert 1 <= len([event for event in events if event.info is not None]) <= 3
    assert fitted.trainer.adaptive_result.micro_batch < 16


# --- every feature, in pieces


def adaptive_of(kind):
    return type(f"Adaptive{kind.__name__}", (AdaptiveTrainerMixin, kind), {})


class Counted(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, compute_loss_func=self.counted_loss, **kwargs)

    def counted_loss(self, outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return loss / num_items_in_batch


class OfLogits(Trainer):
    """Has a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.loss_of(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class MeanOfSamples(OfLogits):
    """Each sample counts as much, whatever it has of labels."""

    def loss_of(self, logits, labels):
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses.sum(1) / (labels != -100).sum(1)).mean()


class Scaled(Trainer):
    """With a scaler of gradients, as fp16 has on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)


class Logging(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        words, labels = outputs.logits.argmax(-1), inputs["labels"]
        told = {
            "told loss": float(outputs.loss.detach()), "rate": 0.1,
            "largest": float(outputs.logits.detach().max()),
            "n right": int((words == labels).sum()),
            "mean label": float(labels[labels != -100].double().mean()),
        }  # fmt: skip
        self.log(told)
        return outputs.loss


def without_loss_kwargs():
    model = llama()
    model.accepts_loss_kwargs = False
    return model


def bfloat16():
    return llama().float()


def compared(kind, model, data, tolerance=1e-9, maximum=5, **settings):
    """Train without and with the mixin, in pieces; the same, and what was logged too."""
    plain = trained(kind, model(), data, **settings)
    torch.compiler.reset()
    settings["options"] = {"maximum": maximum, **settings.get("options", {})}
    fitted = trained(adaptive_of(kind), model(), data, **settings)
    fitted.assert_same(plain, tolerance)
    assert fitted.trainer.adaptive_result.micro_batch == maximum
    return fitted


_FEATURES = {
    "accumulation, checkpointing": (
        Trainer, llama, texts, {"gradient_accumulation_steps": 3, "gradient_checkpointing": True},
    ),
    "classes": (Trainer, bert, classes, {}),
    "encoder and decoder": (Trainer, t5, texts, {}),
    "label smoothing without a count": (
        Trainer, without_loss_kwargs, texts, {"label_smoothing_factor": 0.1},
    ),
    "compute_loss_func": (Counted, llama, texts, {}),
    "logs": (Logging, words, texts, {}),
    "compute_loss": (MeanOfSamples, words, texts, {"gradient_accumulation_steps": 2}),
    "scaler": (Scaled, llama, texts, {"max_grad_norm": 0.0}),
    "bfloat16": (Trainer, bfloat16, texts, {"bf16": True}),
    "compiled": (
        Trainer, words, texts, {"torch_compile": True, "torch_compile_backend": "eager"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
# dynamo tells so of the masks of transformers 4
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")
@pytest.mark.parametrize("feature", _FEATURES)
def test_pieces_train_as_the_whole_does(feature):
    kind, model, data, arguments = _FEATURES[feature]
    # AdamW makes a step of a rounding error
    arguments = {"optim": "sgd", **arguments}
    tolerance = 2e-2 if feature == "bfloat16" else 1e-9
    run = compared(kind, model, data(), tolerance, arguments=arguments, steps=2)
    assert run.trainer.adaptive_result.sizes == (5, 5, 4, 2)


def test_a_batch_that_fits_is_the_plain_step_to_the_bit():
    # random numbers, too
    plain = trained(Trainer, gpt2(dropout=0.1), texts())
    fitted = trained(AdaptiveTrainer, gpt2(dropout=0.1), texts())
    assert fitted.losses == plain.losses
    assert all(map(torch.equal, fitted.parameters, plain.parameters))


def test_training_that_is_resumed_ends_where_one_that_was_not_does():
    settings = {"steps": 6, "options": {"maximum": 5}}
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = trained(AdaptiveTrainer, gpt2(), texts(), arguments=saving, **settings)
    resumed = trained(AdaptiveTrainer, gpt2(), texts(), resume="checkpoint-3", **settings)
    assert resumed.trainer.state.global_step == 6
    assert resumed.losses[3:] == pytest.approx(whole.losses[3:])
    torch.testing.assert_close(resumed.parameters, whole.parameters, rtol=1e-9, atol=1e-9)


class Told(TrainerCallback):
    """Which events came, in order, and what the state was."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        events = super().__getattribute__("events")

        def told(args, state, control, **kwargs):
            told_of = (state.global_step, state.epoch, state.total_flos, control.should_log)
            events.append((name, *told_of))

        return told


def test_callbacks_and_state_are_those_of_the_plain_trainer_and_the_library_is_unchanged():
    told, before = [Told(), Told()], dict(vars(Trainer))
    settings = {"arguments": {"gradient_accumulation_steps": 2, "num_train_epochs": 2}, "steps": 4}
    for kind, each in zip((Trainer, AdaptiveTrainer), told, strict=True):
        options = {"maximum": 7} if kind is AdaptiveTrainer else None
        run = trained(kind, gpt2(), texts(), callbacks=[each], options=options, **settings)
    assert run.trainer.adaptive_result.micro_batch < 16
    assert told[0].events == told[1].events
    assert dict(vars(Trainer)) == before
    assert "backward" not in vars(run.trainer.accelerator)


def test_a_batch_encoding_stays_one():
    kinds = set()

    class Seeing(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            kinds.add((type(inputs), len(inputs.input_ids)))
            return super().compute_loss(model, inputs, **kwargs)

    def collate(samples):
        return transformers.BatchEncoding(stacked(samples))

    compared(Seeing, gpt2, texts(), 1e-6, 6, steps=1, data_collator=collate)
    assert {(transformers.BatchEncoding, 6), (transformers.BatchEncoding, 4)} <= kinds
    assert {cls for cls, _ in kinds} == {transformers.BatchEncoding}


def test_a_loss_that_mixes_samples_is_refused_and_what_was_tried_is_told():
    experts = {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    settings = _SMALL | _ENDS | experts
    # its experts multiply no numbers of 64 bits
    model = made("Mixtral", "ForCausalLM", num_attention_heads=2, **settings).float()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(SplitMismatchError) as caught:
        trained(AdaptiveTrainer, model, texts(), options={"maximum": 8})
    # what is no advice to who writes no function
    assert "takes num_items_in_batch" not in caught.value.advice
    assert "output_router_logits" in caught.value.advice
    assert caught.value.advice.startswith(
        "AdaptiveTrainer tried the loss as a sum that num_items_in_batch divides; as a mean over "
        "valid labels, shifted by one; as a mean over valid labels; as a mean over samples. The "
    )
    assert all(map(torch.equal, before, model.parameters()))


class ClassWeights(OfLogits):
    """As the docs of transformers show it."""

    weights = torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)

    def loss_of(self, logits, labels):
        return nn.CrossEntropyLoss(weight=self.weights)(logits.mean(1)[:, :3], labels)


@pytest.mark.slow
def test_weights_of_classes_are_refused_with_the_line_to_write():
    kind = adaptive_of(ClassWeights)

    def run(kind, options=None):
        settings = {"arguments": {"optim": "sgd"}, "steps": 2, "options": options}
        return trained(kind, words(), classes(), **settings)

    with pytest.raises(SplitMismatchError) as caught:
        run(kind, {"maximum": 5})
    message, error = str(caught.value), caught.value
    # as a sum it is twice of what it was, which nobody has claimed
    assert "The closest is told, a mean over" in message
    assert abs(error.split - error.whole) < 0.9 * abs(error.whole)
    assert "step(" not in message
    assert "Return the outputs" not in message
    line = re.search(r'adaptive_options = (\{"weight": .*?\.sum\(\)\}),', message)
    options = eval(line[1], {"class_weights": ClassWeights.weights})
    run(kind, {"maximum": 5, **options}).assert_same(run(ClassWeights))


def test_patches_that_are_no_samples_are_refused_by_name():
    def collate(samples):
        patches = {"pixel_values": torch.ones(40, 6), "image_grid_thw": torch.ones(5, 3)}
        return stacked(samples) | patches

    arguments = {"remove_unused_columns": False}
    with pytest.raises(AdaptiveUsageError, match=r"'pixel_values'\] has 40 samples .* in_dims"):
        trained(AdaptiveTrainer, gpt2(), texts(), data_collator=collate, arguments=arguments)


def test_what_does_not_verify_has_to_say_how_its_loss_adds_up():
    with pytest.raises(AdaptiveUsageError, match=r"verify=False .* Say it with loss= or weight="):
        trained(AdaptiveTrainer, gpt2(), texts(), options={"verify": False})
    options = {"verify": False, "loss": "sum", "maximum": 5}
    plain = trained(Trainer, gpt2(), texts(), steps=1)
    trained(AdaptiveTrainer, gpt2(), texts(), options=options, steps=1).assert_same(plain)


# what `compute_loss` returns of the outputs, and what the option makes of that
_MADE_LATER = {
    "loss": (lambda out: out, lambda out: out.std(0).sum()),
    "then": (lambda out: out.square().mean(), torch.sqrt),
}


@pytest.mark.parametrize("name", _MADE_LATER)
def test_accumulation_divides_the_loss_and_not_what_it_is_made_of(name):
    part, made = _MADE_LATER[name]

    class Plain(Trainer):
        def part_of(self, model, inputs):
            out = model(input_ids=inputs["input_ids"]).logits.mean(1)
            self.log({"told": float(out.detach().square().mean())})
            return part(out)

        def compute_loss(self, model, inputs, **kwargs):
            return made(self.part_of(model, inputs))

    class Later(AdaptiveTrainerMixin, Plain):
        def compute_loss(self, model, inputs, **kwargs):
            return self.part_of(model, inputs)

    data = [{"input_ids": each["input_ids"]} for each in texts()]
    # the second step has one batch: the epoch ends
    settings = {"arguments": {"gradient_accumulation_steps": 3, "optim": "sgd"}, "steps": 2}
    plain = trained(Plain, words(), data, **settings)
    options = {"maximum": 5, name: made}
    fitted = trained(Later, words(), data, options=options, **settings)
    # the logs are of what the loss is made of, and not of the loss
    fitted.assert_same(plain)
    assert len([each for each in fitted.logged if "told" in each]) == 4
    assert fitted.trainer.adaptive_result.sizes == (5, 5, 4, 2)


def test_a_trainer_that_runs_backward_itself_is_refused():
    class Base(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    kind = adaptive_of(Base)
    with pytest.raises(AdaptiveUsageError, match=r"called accelerator.backward\(\) 0 times"):
        trained(kind, gpt2(), texts())


def test_a_mixin_that_would_never_be_reached_is_refused_by_its_class():
    with pytest.raises(AdaptiveUsageError, match=r"class Behind\(AdaptiveTrainerMixin, \.\.\.\)"):
        type("Behind", (Seq2SeqTrainer, AdaptiveTrainerMixin), {})
    with pytest.raises(AdaptiveUsageError, match=r"Own\.training_step\(\) hides that of"):

        class Own(AdaptiveTrainer):
            def training_step(self, model, inputs, num_items_in_batch=None):
                return self.compute_loss(model, inputs)

    # one that calls it is no hindrance
    class Calling(AdaptiveTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("args.auto_find_batch_size", True, "begins the training anew with smaller batches"),
        ("args.optim", "lomo", "moves parameters inside the backward pass"),
        ("args._n_gpu", 2, "DataParallel on 2 devices splits batches by itself"),
        ("is_deepspeed_enabled", True, "DeepSpeed's engine counts each backward pass"),
        ("is_distributed_loading_by_transformers", True, "tensor, context or sequence paralleli"),
        ("is_fsdp_enabled", True, "FSDP runs collectives in every pass"),
    ],
)
def test_what_can_not_be_taken_back_is_refused_before_training(
    monkeypatch, setting, value, message
):
    trainer = trainer_of(AdaptiveTrainer, gpt2(), texts())
    if "fsdp" in setting:
        monkeypatch.setattr(TrainingArguments, "world_size", 2)
    *path, name = setting.split(".")
    setattr(trainer.args if path else trainer, name, value)
    with pytest.raises(AdaptiveUsageError, match=rf"AdaptiveTrainer can't train: .*{message}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_memory_that_does_not_do_for_one_sample_is_an_error_and_parameters_are_as_before():
    model = gpt2()
    before = [p.detach().clone() for p in model.parameters()]
    with (
        memory_budget("60KiB"),
        pytest.raises(OutOfRetriesError, match=r"AdaptiveTrainer\.training"),
    ):
        trained(AdaptiveTrainer, model, texts())
    assert all(map(torch.equal, before, model.parameters()))


# --- evaluation


def evaluated(kind, model, data, *, most=None, full_at=None, arguments=None, **kwargs):
    """What a prediction gives where a module has room for so many samples."""
    arguments = {"per_device_eval_batch_size": 16, **(arguments or {})}
    trainer = trainer_of(kind, model, data, arguments=arguments, **kwargs)
    (full_at or model).register_forward_pre_hook(full(most), with_kwargs=True)
    output = trainer.predict(data)
    assert trainer.args.per_device_eval_batch_size == 16
    return output


def assert_same_evaluation(fitted, whole):
    assert fitted.metrics["test_loss"] == pytest.approx(whole.metrics["test_loss"], rel=1e-6)
    for mine, theirs in zip(
        _arrays((fitted.predictions, fitted.label_ids)),
        _arrays((whole.predictions, whole.label_ids)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def _arrays(tree):
    if isinstance(tree, np.ndarray):
        return [tree]
    return [array for each in tree or () for array in _arrays(each)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "make"), [(Trainer, llama), (MeanOfSamples, llama), (Trainer, t5)]
)
def test_an_evaluation_in_pieces_gives_what_the_whole_does(kind, make):
    data = texts(40)
    whole = evaluated(kind, make(), data)
    fitted = evaluated(adaptive_of(kind), make(), data, most=5)
    assert_same_evaluation(fitted, whole)


def test_metrics_of_each_batch_see_what_they_would_of_the_whole():
    def counting():
        seen = []

        def compute_metrics(prediction, compute_result):
            seen.append(int((prediction.predictions == prediction.label_ids).sum()))
            return {"hits": sum(seen), "batches": len(seen)} if compute_result else {}

        return compute_metrics

    settings = {
        "arguments": {"batch_eval_metrics": True},
        "preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1),
    }
    found = []
    for kind, most in ((Trainer, None), (AdaptiveTrainer, 5)):
        settings["compute_metrics"] = counting()
        output = evaluated(kind, llama(), texts(40), most=most, **settings)
        found.append((output.metrics["test_hits"], output.metrics["test_batches"]))
    assert found[0] == found[1]
    assert found[0][1] == 3


def test_an_evaluation_that_runs_out_changes_no_size_of_the_training(events):
    model = gpt2()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16}
    trainer = trainer_of(
        AdaptiveTrainer, model, texts(), eval_dataset=texts(20), arguments=settings
    )

    def refuse(module, args, kwargs):
        if not module.training and len(kwargs["input_ids"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    trainer.train()
    assert {event.name for event in events} == {"AdaptiveTrainer.prediction_step"}
    assert trainer.adaptive_result.sizes == (16,)
    trained(Trainer, gpt2(), texts()).assert_same(Run(trainer))


class Contrastive(OfLogits):
    def loss_of(self, logits, labels):
        rows = logits.flatten(1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class SpreadOfLogits(OfLogits):
    def loss_of(self, logits, labels):
        return logits.std()


@pytest.mark.parametrize(
    ("kind", "preprocess", "message"),
    [
        (Contrastive, None, "pieces of a batch don't tell the loss"),
        (ClassWeights, None, "pieces of a batch don't tell the loss"),
        (SpreadOfLogits, None, "pieces of a batch don't tell the loss.*adaptive_options"),
        (Trainer, lambda logits, _: logits - logits.mean(0), "rows depend on other samples"),
        (Trainer, lambda logits, _: logits.argsort(0), "rows depend on other samples"),
        (Trainer, lambda logits, _: logits.mean(), r"float64\[\] on cpu, 8 B among its outputs"),
    ],
)
def test_an_evaluation_that_pieces_do_not_tell_is_refused(kind, preprocess, message):
    settings = {"most": 6, "preprocess_logits_for_metrics": preprocess}
    data = by_class() if kind is ClassWeights else texts(16)
    with pytest.raises(SplitMismatchError, match=message):
        evaluated(adaptive_of(kind), llama(), data, **settings)


def by_class():
    return sorted(classes(16), key=lambda each: each["labels"])


def test_an_evaluation_in_pieces_uses_the_declared_weight():
    options = {"weight": lambda batch: ClassWeights.weights[batch["labels"]].sum()}
    whole = evaluated(ClassWeights, llama(), by_class())
    fitted = evaluated(adaptive_of(ClassWeights), llama(), by_class(), most=6, options=options)
    assert_same_evaluation(fitted, whole)


def test_an_evaluation_in_pieces_may_round_as_tf32_does():
    def rounded(logits, labels):
        return logits * (1 + 1e-4 * len(logits))

    settings = {"most": 6, "preprocess_logits_for_metrics": rounded}
    with torch.backends.flags(fp32_precision="tf32"):
        found = evaluated(AdaptiveTrainer, llama().float(), texts(16), **settings)
    assert found.metrics["test_loss"]


def test_comparisons_of_an_evaluation_in_pieces_change_no_random_numbers():
    def drawing(module, args, outputs):
        torch.rand(len(outputs.logits))

    drawn = []
    for kind, most in ((Trainer, None), (AdaptiveTrainer, 5)):
        model = llama()
        model.register_forward_hook(drawing)
        evaluated(kind, model, texts(20), most=most)
        drawn.append(torch.rand(()))
    assert drawn[0] == drawn[1]


def test_a_batch_of_other_lengths_is_predicted_whole():
    def collate(samples):
        return {"position_ids": torch.arange(_LENGTH)[None], **stacked(samples)}

    settings = {"data_collator": collate, "arguments": {"remove_unused_columns": False}}
    evaluated(AdaptiveTrainer, llama(), texts(16), **settings)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        evaluated(AdaptiveTrainer, llama(), texts(16), most=6, **settings)
    assert "other numbers of samples: {" in caught.value.__notes__[0]
    options, kind = {"in_dims": {"position_ids": None}}, MeanOfSamples
    whole = evaluated(kind, llama(), texts(16), **settings)
    kind = adaptive_of(kind)
    fitted = evaluated(kind, llama(), texts(16), most=6, options=options, **settings)
    assert_same_evaluation(fitted, whole)


@pytest.mark.slow
def test_generated_sequences_are_put_together():
    settings = {
        "args_kind": transformers.Seq2SeqTrainingArguments,
        "arguments": {"predict_with_generate": True, "generation_max_length": 5},
    }
    kind, model = adaptive_of(Seq2SeqTrainer), t5()
    whole = evaluated(Seq2SeqTrainer, t5(), texts(16), **settings)
    settings["full_at"] = model.get_encoder()
    assert_same_evaluation(evaluated(kind, model, texts(16), most=6, **settings), whole)
    del settings["full_at"]
    trained(kind, t5(), texts(), options={"maximum": 6}, **settings, steps=1)


class Hoarder(TrainerCallback):
    """Keeps what it should not."""

    def __init__(self, n=100):
        self.history, self.n = [], n

    def on_step_end(self, args, state, control, **kwargs):
        self.history.append(torch.ones(self.n))


class Reporter(TrainerCallback):
    """Stands before the callback of memory, as those that `report_to` brings do."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.slow
def test_what_outlives_steps_comes_to_the_log_and_is_named_once(caplog):
    reporter = Reporter()
    callbacks = [reporter, Hoarder(), MemoryCallback(share=float("inf"))]
    settings = {"callbacks": callbacks, "steps": 13, "options": {"maximum": 6}}
    with caplog.at_level(logging.WARNING, "tenure.memory"):
        run = trained(AdaptiveTrainer, gpt2(), texts(), **settings)
    steps = [each for each in run.trainer.state.log_history if "loss" in each]
    assert [{**told, "step": n + 1} for n, told in enumerate(reporter.logs[:13])] == steps
    # those of steps 2 to 7, and to 13: parameters and the state of the optimizer are meant to stay
    figures = ("memory/outlived_tensors", "memory/outlived_bytes", "memory/growth_bytes")
    assert [steps[6][key] for key in figures[:2]] == [6, 2400]
    assert [steps[12][key] for key in figures] == [12, 4800, 1200]
    # nobody has looked since
    assert not {"memory/allocated_bytes", "memory/growth_bytes"} & steps[7].keys()
    (record,) = caplog.records
    assert "history grew by 6 tensors, " in record.message
    assert "from step 1 to step 7" in record.message
    assert steps[12]["adaptive/retries"] == 0
    assert steps[12]["adaptive/micro_batch"] == 6
    # of the whole training, and no step's
    assert not any("memory" in key for key in run.trainer.state.log_history[-1])


def test_training_that_dies_of_memory_is_told_what_held_it_and_of_no_other_error(caplog):
    class Dying(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise error

    oom = torch.OutOfMemoryError
    for kind, cls in ((Trainer, ValueError), (AdaptiveTrainer, ValueError), (AdaptiveTrainer, oom)):
        error, callbacks = cls("no"), [Hoarder(2**22), MemoryCallback(), Dying()]
        with pytest.raises(cls):
            trained(kind, gpt2(), texts(), callbacks=callbacks, steps=5)
        assert hasattr(error, "__notes__") is (cls is oom)
    (note,) = error.__notes__
    first, *rows = note.splitlines()
    assert first.startswith("tenure: ")
    assert "optimizer state" in first
    assert "other tensors" in first
    assert any("history[" in row and "16.0 MiB: " in row for row in rows)
    assert "grew by 3 tensors, 48.0 MiB" in note
    assert [record.message for record in caplog.records] == [note]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_of_keys_and_values_is_returned_by_a_scoped_function_and_detached():
    read = torch.no_grad()(llama().eval())
    words = torch.tensor([[3, 4, 5]])
    expected = read(words).logits[:, -1:]
    first = scoped(read)(words[:, :1])
    with NewDisposeScope():
        second = read(words[:, 1:2], past_key_values=first.past_key_values)
        cache = detach_from_scope(second.past_key_values)
    assert is_disposed(second.logits)
    assert torch.allclose(read(words[:, 2:], past_key_values=cache).logits, expected, atol=1e-6)


def test_a_dynamic_rope_that_grew_in_a_scope_computes_as_without_scopes():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(
        **_SMALL, num_attention_heads=2, max_position_embeddings=_LENGTH, rope_parameters=rope
    )
    lengths = (4, 3 * _LENGTH, 2 * _LENGTH, 4)
    given = [(torch.ones(1, n, 16), torch.arange(n)[None]) for n in lengths]
    plain, ours = LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(config)
    for tensors in given:
        with NewDisposeScope():
            found = ours(*tensors)
            assert all(map(torch.equal, found, plain(*tensors)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_made_and_merged_in_scopes_are_whole():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    words = torch.tensor([[3, 4, 5]])
    for kind in (
        peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
        peft.FourierFTConfig(n_frequency=8, target_modules=["q_proj"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ):
        base = llama().float()
        with NewDisposeScope():
            model = peft.get_peft_model(base, kind).eval()
            expected = detach_from_scope(model(input_ids=words).logits)
        if isinstance(kind, peft.LoraConfig):
            with NewDisposeScope():
                model.merge_adapter()
            with NewDisposeScope():
                model.unmerge_adapter()
        assert torch.allclose(model(input_ids=words).logits, expected, atol=1e-6)
