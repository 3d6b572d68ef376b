"""Models of transformers, paged from memory and from disk: they generate what they do whole."""

import pytest
import torch
import transformers
from transformers import (
    LlamaConfig,
    MixtralConfig,
    T5Config,
)

from tenure.paging import PagingError, page, plan_paging

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = [pytest.mark.sim_allocator("cuda"), pytest.mark.usefixtures("without_gradients")]

_SMALL = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "T5ForConditionalGeneration": lambda: T5Config(
        **_SMALL, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "LlamaForCausalLM": lambda: LlamaConfig(**_SMALL, **_DECODER),
    "MixtralForCausalLM": lambda: MixtralConfig(
        **_SMALL, **_DECODER, num_local_experts=4, experts_implementation="eager"
    ),
}


def build(name):
    torch.manual_seed(0)
    return getattr(transformers, name)(MODELS[name]()).eval()


def inputs_of(name):
    torch.manual_seed(1)
    tokens = torch.randint(3, 60, (2, 7))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def least_budget(model, device, host):
    weight_bytes = plan_paging(model, device, host=host).weight_bytes
    try:
        plan_paging(model, device, budget=weight_bytes // 2, host=host)
    except PagingError as error:
        return error.minimum_bytes
    return weight_bytes // 2


# transformers takes the model to be where its parameters are outside of the forward
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:You are calling .generate")
@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_generate_with_inputs_on_the_host_and_on_the_device(sim, name, is_on_disk, tmp_path):
    model, inputs = build(name), inputs_of(name)
    options = {"max_new_tokens": 3, "do_sample": False}
    if name.startswith("T5"):
        options["num_beams"] = 2
    expected = model.generate(**inputs, **options)
    host = tmp_path if is_on_disk else "pinned"
    budget_bytes = least_budget(model, sim.device, host) + 8192
    with page(model, sim.device, budget=budget_bytes, host=host):
        for device in ("cpu", sim.device):
            there = {key: each.to(device) for key, each in inputs.items()}
            assert torch.equal(model.generate(**there, **options).cpu(), expected)


# a later name of the argument, which earlier releases don't know
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_that_the_caller_keeps_grows_from_call_to_call(sim):
    model, tokens = build("LlamaForCausalLM"), inputs_of("LlamaForCausalLM")["input_ids"]
    expected = model(tokens).logits[:, -1:]
    budget_bytes = least_budget(model, sim.device, "pinned") + 8192
    with page(model, sim.device, budget=budget_bytes):
        cache = transformers.DynamicCache()
        for i in range(tokens.shape[1]):
            output = model(tokens[:, i : i + 1], past_key_values=cache)
            assert output.past_key_values is cache
            assert cache.get_seq_length() == i + 1
    torch.testing.assert_close(output.logits.cpu(), expected)
