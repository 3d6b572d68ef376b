"""Steps of a paged model are those of a plain one, bit for bit, under budgets it does not fit."""

import pytest
import torch
from torch import nn

from .blocks import LARGE, Checkpointed, inputs, transformer

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

MODES = {
    "plain": transformer,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
}


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach().cpu()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("share", "activations"),
    [
        (0.5, None),
        pytest.param(0.5, "host", marks=pytest.mark.exhaustive),
    ],
)
def test_steps_of_adamw_equal_those_of_a_plain_model(sim, pair, mode, share, activations):
    torch.manual_seed(0)
    both = pair(MODES[mode]())
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=0.01) for m in (both.host, both.there)}
    with both.page(share, activations=activations):
        for x in inputs(sim, 3, LARGE if activations else 2):
            x = x.requires_grad_("reentrant" in mode)
            paged, plain = both.run(lambda model, x=x: train(model, optimizers[model], x))
            assert torch.equal(paged, plain)
            assert both.gradients_differ() == []
    assert both.values_differ() == []


def test_gradients_lie_on_the_host_with_the_strides_of_their_parameters(sim, pair):
    model = transformer()
    model[0].up.weight = nn.Parameter(torch.randn(32, 64).t())
    both = pair(model)
    with both.page():
        both.run(lambda model: model(inputs(sim)[0]).sum().backward())
    assert both.gradients_differ() == []
    parameters = list(both.host.parameters())
    assert all(p.grad.stride() == p.stride() for p in parameters)
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in parameters)


# another rounds each gradient up
@pytest.mark.sim_allocator("exact")
def test_the_gradients_of_two_units_are_on_the_device_at_most(sim, pair):
    both = pair()
    x = torch.randn(1, 1, 32, device=sim.device)  # so that all else is small
    unit_bytes = both.weight_bytes // len(both.host)
    with both.page():
        for _ in range(2):
            before_bytes = sim.allocated_bytes
            sim.reset_peak()
            both.host(x).sum().backward()
            taken_bytes = sim.peak_bytes - before_bytes
            assert sim.allocated_bytes == before_bytes
            assert unit_bytes < taken_bytes < 2.7 * unit_bytes


@pytest.mark.exhaustive
def test_passes_without_gradients_come_in_between(sim, pair):
    both = pair()
    x, y = inputs(sim, 2)

    def step(model):
        model.eval()
        with torch.no_grad():
            before = model(y)
        model.train()
        model(x).sum().backward()
        with torch.inference_mode():
            return before, model.eval()(y)

    with both.page():
        for _ in range(3):
            (a, b), (c, d) = both.run(step)
            assert torch.equal(a, c)
            assert torch.equal(b, d)
            assert both.gradients_differ() == []


def test_gradients_take_no_more_memory_from_step_to_step(sim, pair):
    both = pair()
    seen = []
    with both.page() as handle:
        for x in inputs(sim, 3):
            both.host.zero_grad()
            both.host(x).sum().backward()
            seen.append(handle.report().host_bytes)
    assert len(set(seen)) == 1
    assert 2 * both.weight_bytes <= seen[0] < 2.5 * both.weight_bytes


def test_frozen_weights_send_no_byte_to_the_host(sim, pair):
    model = transformer()
    for block in model[1:]:
        block.requires_grad_(False)
    model[-1].down.bias.requires_grad_(True)
    both = pair(model)
    x = inputs(sim)[0]
    with both.page():
        for _ in range(2):
            before_bytes = sim.copied_bytes("d2h")
            both.run(lambda model: model(x).sum().backward())
            copied_bytes = sim.copied_bytes("d2h") - before_bytes
            assert copied_bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad)
            assert both.gradients_differ() == []


def test_a_frozen_model_gives_its_input_gradients_within_half_its_weights(sim, pair):
    both = pair(transformer().requires_grad_(False))
    before_bytes = sim.copied_bytes("d2h")
    with both.page():

        def gradient(model):
            x = inputs(sim)[0].requires_grad_()
            model(x).sum().backward()
            return x.grad

        for _ in range(2):
            paged, plain = both.run(gradient)
            assert torch.equal(paged, plain)
    assert sim.copied_bytes("d2h") == before_bytes
