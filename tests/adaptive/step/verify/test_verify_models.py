"""Models of transformers: what their ``.loss`` divides by is named, and what mixes is refused."""

import pytest
import torch

from tenure.adaptive import step

from ..step_cases import gradients, refused, wanted_of

transformers = pytest.importorskip("transformers")

_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_LM = {**_SIZES, "vocab_size": 40, "intermediate_size": 32, "max_position_embeddings": 32}


def _llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LM, num_key_value_heads=2))


def _opt():
    """Its positions are counted in floats, from a mask."""
    config = transformers.OPTConfig(**_LM, ffn_dim=32, word_embed_proj_dim=16)
    return transformers.OPTForCausalLM(config)


def _bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**_LM))


def _mixtral(router):
    config = transformers.MixtralConfig(
        **_LM, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=router, router_aux_loss_coef=0.5,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


LANGUAGE = {"llama": _llama, "opt": _opt, "bert": _bert}
SHIFTED = ("llama", "opt")


def _made(make):
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(3, 40, (12, 7))
    labels = ids.clone()
    for i, row in enumerate(labels):
        row[: i % 6] = -100
    return model, {"input_ids": ids, "labels": labels}, lambda batch: model(**batch).loss


@pytest.mark.parametrize("name", LANGUAGE)
def test_full_labels_are_left_alone_and_the_weight_of_others_is_named_ready_to_paste(name):
    model, batch, loss_of = _made(LANGUAGE[name])
    full = batch | {"labels": batch["input_ids"]}
    assert step(loss_of, full, model=model, maximum=5).sizes == (5, 5, 2)
    model.zero_grad()
    advice = refused(loss_of, batch, model=model).advice
    assert not gradients(model)
    place = "batch['labels'][:, 1:]" if name in SHIFTED else "batch['labels']"
    assert f"weight=lambda batch: ({place} != -100).sum()" in advice
    shown = advice.partition("weight=")[2].partition(" (with")[0]
    step(loss_of, batch, model=model, maximum=4, weight=eval(shown))
    if name == "llama":  # without dropout
        split = gradients(model)
        model.zero_grad()
        wanted = wanted_of(model, loss_of(batch))
        torch.testing.assert_close(split, wanted, rtol=1e-3, atol=1e-6)


def test_the_router_loss_of_mixtral_is_refused_although_there_is_a_weight():
    weight = {"weight": lambda batch: (batch["labels"][:, 1:] != -100).sum()}
    model, batch, loss_of = _made(lambda: _mixtral(False))
    step(loss_of, batch, model=model, maximum=4, **weight)
    model, batch, loss_of = _made(lambda: _mixtral(True))
    advice = refused(loss_of, batch, model=model, **weight).advice
    assert "MixtralForCausalLM adds a router loss over all tokens of its batch" in advice
    assert "pass what is computed of all of them as loss=" in advice
