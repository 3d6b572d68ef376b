"""Models of transformers, paged from memory and from disk within the least budget."""

import pytest
import torch
import transformers
from transformers import BeitConfig, LlamaConfig, MixtralConfig, T5Config, XLNetConfig

from tenure.paging import page, plan_paging

from .test_zoo import percent_of_weights

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = [pytest.mark.sim_allocator("cuda"), pytest.mark.usefixtures("without_gradients")]

_SMALL = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_HEADS = {"num_key_value_heads": 2}
MODELS = {
    "T5ForConditionalGeneration": lambda: T5Config(
        **_SMALL, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "LlamaForCausalLM": lambda: LlamaConfig(**_SMALL, **_LAYERS, **_HEADS),
    "MixtralForCausalLM": lambda: MixtralConfig(
        **_SMALL, **_LAYERS, **_HEADS, num_local_experts=4, experts_implementation="eager"
    ),
    "BeitModel": lambda: BeitConfig(
        **_LAYERS, image_size=32, patch_size=8, use_relative_position_bias=True
    ),
    "XLNetModel": lambda: XLNetConfig(vocab_size=60, d_model=32, n_layer=3, n_head=2, d_inner=64),
}


def build(name):
    torch.manual_seed(0)
    return getattr(transformers, name)(MODELS[name]()).eval()


def tokens():
    torch.manual_seed(1)
    return torch.randint(3, 60, (2, 7))


# transformers takes the model to be where its parameters are outside of the forward
@pytest.mark.filterwarnings("ignore:You are calling .generate")
@pytest.mark.parametrize(
    ("name", "is_on_disk"),
    [
        ("T5ForConditionalGeneration", True),
        ("LlamaForCausalLM", False),
        ("MixtralForCausalLM", True),
        ("MixtralForCausalLM", False),
    ],
)
def test_generate_with_inputs_on_the_host_and_on_the_device(sim, name, is_on_disk, tmp_path):
    model, inputs = build(name), {"input_ids": tokens()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"max_new_tokens": 3, "do_sample": False}
    if name.startswith("T5"):
        options["num_beams"] = 2
    expected = model.generate(**inputs, **options)
    host = tmp_path if is_on_disk else "pinned"
    budget_bytes = percent_of_weights(model, sim.device, 50, host) + 8192
    with page(model, sim.device, budget=budget_bytes, host=host):
        for device in ("cpu", sim.device):
            there = {key: each.to(device) for key, each in inputs.items()}
            assert torch.equal(model.generate(**there, **options).cpu(), expected)


@pytest.mark.parametrize("name", ["BeitModel", "XLNetModel"])
def test_transformers_run_in_the_least_budget_that_an_error_names(name, tmp_path):
    model = build(name)
    inputs = (torch.randn(2, 3, 32, 32),) if name == "BeitModel" else (tokens(),)
    expected = model(*inputs).last_hidden_state.clone()
    least_bytes = percent_of_weights(model, "cpu", 0, tmp_path)
    plan = plan_paging(model, "cpu", budget=least_bytes, host=tmp_path)
    assert plan.allocated_bytes <= least_bytes == plan.minimum_bytes < plan.weight_bytes // 2
    with page(model, "cpu", budget=least_bytes, host=tmp_path):
        for _ in range(2):
            assert torch.equal(model(*inputs).last_hidden_state, expected)


# a later name of the argument, which earlier releases don't know
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_that_the_caller_keeps_grows_from_call_to_call(sim):
    model, given = build("LlamaForCausalLM"), tokens()
    expected = model(given).logits[:, -1:]
    budget_bytes = percent_of_weights(model, sim.device, 50) + 8192
    with page(model, sim.device, budget=budget_bytes):
        cache = transformers.DynamicCache()
        for i in range(given.shape[1]):
            output = model(given[:, i : i + 1], past_key_values=cache)
            assert output.past_key_values is cache
            assert cache.get_seq_length() == i + 1
    torch.testing.assert_close(output.logits.cpu(), expected)
