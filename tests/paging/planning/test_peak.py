"""What a plan says of the device's peak, held against what the simulated device has had."""

import pytest
import torch
from torch import nn

from tenure.adaptive import PredictionError, plan, predict_peak
from tenure.paging import page, plan_paging

from ..models import linears
from ..support import assert_equal, weight_bytes
from ..transformers_models import build

N_FEATURES = 64


def mlp():
    return nn.Sequential(*[m for layer in linears(6, N_FEATURES) for m in (layer, nn.Tanh())])


def llama():
    return build("LlamaForCausalLM", num_hidden_layers=3)


def true_peak(sim, model, inputs, trains, options):
    with page(model, sim.device, **options):
        peaks = []
        for _ in range(2):
            model.zero_grad()
            sim.reset_peak()
            with torch.set_grad_enabled(trains):
                output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
                if trains:
                    end = getattr(output, "logits", output)
                    end.backward(torch.ones_like(end))
                    del end
            peaks.append(sim.peak_bytes)
            del output
    return max(peaks)


@pytest.mark.parametrize(
    ("make", "trains", "activations", "most"),
    [
        (llama, False, None, 1.01),
        (llama, True, None, 1.03),
        (llama, True, "host", 1.18),
        (mlp, True, None, 1.03),
        (mlp, True, "host", 1.18),
    ],
)
def test_the_peak_is_never_above_what_was_told_and_near_it(sim, make, trains, activations, most):
    model = make().train(trains)
    tokens = torch.randint(3, 60, (8, 40))
    inputs = torch.randn(512, N_FEATURES) if make is mlp else {"input_ids": tokens}
    options = {"budget": int(0.9 * weight_bytes(model))}
    if trains:
        options |= {"training": True, "activations": activations}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    plan = plan_paging(model, sim.device, inputs=inputs, **options)
    assert_equal(model.state_dict(), state)
    assert all(p.grad is None for p in model.parameters())
    assert plan.peak_bytes == plan.allocated_bytes + plan.activation_bytes
    peak_bytes = true_peak(sim, model, inputs, trains, options)
    assert peak_bytes <= plan.peak_bytes <= most * peak_bytes
    if trains:
        assert plan.host_activation_bytes < plan.kept_activation_bytes


def test_inputs_may_be_of_meta_and_the_text_says_whether_the_host_helps(sim):
    model = mlp()
    inputs = torch.empty(1 << 20, N_FEATURES, device="meta")
    plan = plan_paging(model, sim.device, inputs=(inputs,), training=True, activations="host")
    assert plan.kept_activation_bytes > 7 * inputs.nbytes
    assert 'activations="host" lowers it: ' in str(plan)
    assert "of activations and inputs: " in str(plan)
    small = plan_paging(model, sim.device, inputs=torch.empty(2, N_FEATURES), training=True)
    assert small.host_activation_bytes == small.kept_activation_bytes
    assert 'activations="host" does not lower it: ' in str(small)
    assert "of activations" not in str(plan_paging(model, sim.device))
    assert plan_paging(model, sim.device).peak_bytes is None


@pytest.mark.parametrize("trains", [True, False])
def test_a_prediction_of_a_model_that_is_paged_is_refused_and_changes_nothing(sim, trains):
    model, x = mlp().train(trains), torch.ones(4, N_FEATURES)
    before = [p.clone() for p in model.parameters()]
    with page(model, sim.device, 1, training=trains):
        for predict in (predict_peak, lambda fn, x: plan(fn, x, "1MiB")):
            with pytest.raises(PredictionError, match=r"Sequential is paged, .* unpage\(\)"):
                predict(lambda x: model(x).sum(), x)
        with pytest.raises(PredictionError, match="Sequential is paged"):
            predict_peak(model[0], x)
        with torch.no_grad():
            model(x)
    assert all(map(torch.equal, model.parameters(), before))
