"""Models of transformers, paged from memory and from disk within the least budget."""

import pytest
import torch

from benchmarks._corpus_transformers import architectures
from benchmarks._paged_cycles import Cycles, call_of, with_eager_experts
from tenure.paging import page, plan_paging

from .support import about_values, percent_of_weights
from .transformers_models import build

pytestmark = [about_values, pytest.mark.usefixtures("without_gradients")]


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
    eager = {"experts_implementation": "eager"} if name.startswith("Mixtral") else {}
    model, inputs = build(name, **eager), {"input_ids": tokens()}
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


def test_generate_copies_no_weight_again_that_stays(sim):
    """It asks for each token where the model is, by a property that reads a parameter."""
    model = build("LlamaForCausalLM")
    with page(model, sim.device, budget="64MiB") as handle:
        model.generate(tokens(), max_new_tokens=3, do_sample=False)
        assert handle.report().bytes_per_pass == 0


@pytest.mark.parametrize("name", ["BeitModel", "XLNetModel"])
def test_transformers_run_in_the_least_budget_that_an_error_names(name, tmp_path):
    model = build(name)
    given = torch.randn(2, 3, 16, 16) if name == "BeitModel" else tokens()
    expected = model(given).last_hidden_state.clone()
    least_bytes = percent_of_weights(model, "cpu", 0, tmp_path)
    plan = plan_paging(model, "cpu", budget=least_bytes, host=tmp_path)
    assert plan.allocated_bytes <= least_bytes == plan.minimum_bytes < plan.weight_bytes // 2
    with page(model, "cpu", budget=least_bytes, host=tmp_path):
        for _ in range(2):
            assert torch.equal(model(given).last_hidden_state, expected)


@pytest.mark.slow
# Their configurations warn of sizes that no model in use has.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", architectures()[::48], ids=lambda made: made.name)
def test_architectures_train_in_the_least_budget_as_they_do_whole(sim, made):
    """`python -m benchmarks.sweep_paging` runs all of them."""
    step = made.build(made.sizes[0])
    with_eager_experts(step.model)
    with torch.enable_grad():
        cycles = Cycles(sim, step.model, trains=True)
        assert cycles.differences([call_of(step, made.family)]) == []
