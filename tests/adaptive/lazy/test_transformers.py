"""Models of transformers with tiny configurations, recorded and in micro-batches."""

import pytest
import torch

from .programs import assert_same

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
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

    assert_same(model, program, room)
