"""Models of transformers: what their ``.loss`` divides by is named, and what mixes is refused."""

import pytest
import torch
from torch import nn

from tenure.adaptive import SplitMismatchError, step

transformers = pytest.importorskip("transformers")

_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_LM = {**_SIZES, "vocab_size": 40, "intermediate_size": 32, "max_position_embeddings": 32}


def _llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LM, num_key_value_heads=2))


def _gpt2():
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def _opt():
    """Its positions are counted in floats, from a mask."""
    sizes = _LM | {"num_hidden_layers": 2}
    config = transformers.OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=16)
    return transformers.OPTForCausalLM(config)


def _bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**_LM))


def _t5():
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _mixtral(router):
    config = transformers.MixtralConfig(
        **_LM, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=router, router_aux_loss_coef=0.5,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _made(make, shape=(12, 7)):
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(3, 40, shape)
    labels = ids.clone()
    for i, row in enumerate(labels):
        row[: i % 6] = -100
    return model, {"input_ids": ids, "labels": labels}


LANGUAGE = {"llama": _llama, "gpt2": _gpt2, "opt": _opt, "bert": _bert, "t5": _t5}
SHIFTED = ("llama", "gpt2", "opt")


def _refused(fn, batch, model, **options):
    with pytest.raises(SplitMismatchError) as caught:
        step(fn, batch, model=model, maximum=4, **options)
    assert all(p.grad is None for p in model.parameters())
    return caught.value


def test_positions_that_a_model_counts_in_floats_hide_no_difference():
    for training in (True, False):
        model, batch = _made(_opt)
        model.train(training)
        _refused(lambda batch: model(**batch).loss, batch, model)  # noqa: B023  # runs at once


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE)
def test_ignored_labels_are_refused_and_the_weight_is_named_ready_to_paste(name):
    model, batch = _made(LANGUAGE[name])
    error = _refused(lambda batch: model(**batch).loss, batch, model)
    place = "batch['labels'][:, 1:]" if name in SHIFTED else "batch['labels']"
    assert f"weight=lambda batch: ({place} != -100).sum()" in error.advice
    assert abs(error.whole - error.split) > 1e-4
    shown = error.advice.partition("weight=")[2].partition(" (with")[0]
    step(lambda batch: model(**batch).loss, batch, model=model, maximum=4, weight=eval(shown))
    split = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.eval()
    model.zero_grad()
    if name == "llama":  # without dropout
        model(**batch).loss.backward()
        for p, other in zip(model.parameters(), split, strict=True):
            torch.testing.assert_close(p.grad, other, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIFTED)
def test_a_weight_on_labels_that_are_not_shifted_is_refused(name):
    model, batch = _made(LANGUAGE[name])
    batch["labels"][3, 0] = batch["labels"][7, 0] = -100
    error = _refused(
        lambda batch: model(**batch).loss,
        batch,
        model,
        weight=lambda batch: (batch["labels"] != -100).sum(),
    )
    assert "weight=lambda batch: (batch['labels'][:, 1:] != -100).sum()" in error.advice


def test_the_router_loss_of_mixtral_is_refused_although_there_is_a_weight():
    weight = {"weight": lambda batch: (batch["labels"][:, 1:] != -100).sum()}
    model, batch = _made(lambda: _mixtral(False))
    step(lambda batch: model(**batch).loss, batch, model=model, maximum=4, **weight)
    model, batch = _made(lambda: _mixtral(True))
    error = _refused(lambda batch: model(**batch).loss, batch, model, **weight)
    assert "MixtralForCausalLM adds a router loss over all tokens of its batch" in error.advice
    assert "pass what is computed of all of them as loss=" in error.advice


def _clip():
    text = transformers.CLIPTextConfig(**_LM)
    vision = transformers.CLIPVisionConfig(
        **_SIZES, intermediate_size=32, image_size=8, patch_size=4
    )
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8
    )
    return transformers.CLIPModel(config)


@pytest.mark.slow
def test_the_contrastive_loss_of_clip_is_refused_and_right_on_outputs():
    torch.manual_seed(0)
    model = _clip()
    batch = {"input_ids": torch.randint(40, (12, 6)), "pixel_values": torch.randn(12, 3, 8, 8)}
    error = _refused(lambda batch: model(**batch, return_loss=True).loss, batch, model)
    assert "pass what is computed of all of them as loss=" in error.advice

    def embedded(batch):
        out = model(**batch)
        return out.text_embeds, out.image_embeds

    def contrast(outputs):
        logits = outputs[0] @ outputs[1].T * model.logit_scale.exp()
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))

    assert step(embedded, batch, loss=contrast, model=model, maximum=4).sizes == (4, 4, 4)


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("training", [True, False])
def test_full_labels_are_left_alone(name, training):
    model, batch = _made(LANGUAGE[name])
    model.train(training)
    batch["labels"] = batch["input_ids"]
    assert step(lambda batch: model(**batch).loss, batch, model=model, maximum=5).sizes == (5, 5, 2)


def test_a_model_in_float64_whose_loss_is_in_float32_is_left_alone():
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double()
    ids = torch.randint(50, (8, 10))
    result = step(lambda batch: model(input_ids=batch, labels=batch).loss, ids, maximum=3)
    assert (result.sizes, result.loss.dtype) == ((3, 3, 2), torch.float32)


def test_a_classifier_is_left_alone_under_autocast():
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**_LM))
    batch = {"input_ids": torch.randint(40, (12, 6)), "labels": torch.randint(2, (12,))}
    with torch.autocast("cpu", torch.bfloat16):
        result = step(lambda batch: model(**batch).loss, batch, model=model, maximum=4)
    assert result.sizes == (4, 4, 4)


@pytest.mark.parametrize("is_module", [False, True])
def test_weights_of_classes_are_named_as_what_the_mean_divides_by(is_module):
    torch.manual_seed(0)
    net, w = torch.nn.Linear(3, 4).double(), torch.tensor([0.1, 1.0, 5.0, 2.0]).double()
    x, y = torch.randn(32, 3, dtype=torch.float64), torch.arange(32) % 4
    criterion = torch.nn.CrossEntropyLoss(weight=w)

    def by_module(batch):
        return criterion(net(batch[0]), batch[1])

    def by_function(batch):
        return torch.nn.functional.cross_entropy(net(batch[0]), batch[1], weight=w)

    loss_of = by_module if is_module else by_function
    with pytest.raises(SplitMismatchError) as caught:
        step(loss_of, (x, y), maximum=4)
    shown = caught.value.advice.partition("weight=")[2].partition(" (with")[0]
    name = "criterion.weight" if is_module else "w"
    assert shown == f"lambda batch: {name}[batch[1]].sum()"
    step(loss_of, (x, y), maximum=4, weight=eval(shown, {"criterion": criterion, "w": w}))
    split = net.weight.grad.clone()
    net.zero_grad()
    loss_of((x, y)).backward()
    torch.testing.assert_close(split, net.weight.grad, rtol=1e-10, atol=1e-12)
