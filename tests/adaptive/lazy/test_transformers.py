"""Models of transformers with tiny configurations, recorded and in micro-batches."""

import pytest
import torch

from .programs import assert_same_gradients

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("forgetful"), pytest.mark.slow]
_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50,
    "intermediate_size": 48,
}  # fmt: skip
_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert():
    config = transformers.BertConfig(**_SIZES, **_WITHOUT_DROPOUT, max_position_embeddings=20)
    return transformers.BertForMaskedLM(config)


def _llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_key_value_heads=1))


@pytest.mark.parametrize("room", [None, 20])
@pytest.mark.parametrize("make", [_bert, _llama])
def test_language_models(make, room):
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(0, 50, (4, 10))
    mask = torch.ones_like(ids)
    mask[1, 7:] = mask[3, 4:] = 0
    labels = torch.where(mask > 0, ids, -100)

    def program(wrap):
        a, b, c = wrap(ids, mask, labels)
        loss = model(input_ids=a, attention_mask=b, labels=c).loss
        loss.backward()
        return loss.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected)


def test_a_vision_transformer():
    sizes = {name: n for name, n in _SIZES.items() if name != "vocab_size"}
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **sizes, **_WITHOUT_DROPOUT, image_size=16, patch_size=4, num_labels=3
    )
    model = transformers.ViTForImageClassification(config).double()
    pixels, labels = torch.randn(4, 3, 16, 16).double(), torch.tensor([0, 1, 2, 1])

    def program(wrap):
        a, b = wrap(pixels, labels)
        model(a, labels=b).loss.backward()

    # of 17 rows for each sample
    assert_same_gradients(model, program, 40)
