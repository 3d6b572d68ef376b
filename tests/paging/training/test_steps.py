"""Steps of a paged model are those of a plain one, bit for bit, under budgets it does not fit."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tenure.paging import page

from ..support import about_values, assert_equal, home, same
from .blocks import LARGE, Checkpointed, inputs, mlp, transformer

pytestmark = about_values

MODES = {
    "plain": transformer,
    "checkpoint": lambda: Checkpointed(transformer(), use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(transformer(), use_reentrant=True),
}


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach().cpu()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activations", [None, "host"])
def test_steps_of_adamw_equal_those_of_a_plain_model(sim, pair, mode, activations):
    both = pair(MODES[mode]())
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=0.01) for m in (both.host, both.there)}
    with both.page(activations=activations):
        for x in inputs(sim, 3, LARGE if activations else 2):
            x = x.requires_grad_("reentrant" in mode)
            both.agree(lambda model, x=x: train(model, optimizers[model], x))
    assert both.values_differ() == []


@pytest.mark.parametrize("meanwhile", [True, False])
def test_the_next_forward_has_the_values_of_a_fused_step(sim, pair, meanwhile):
    both = pair()
    parameters = list(both.host.parameters())  # on the CPU torch counts no write of such a step
    optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
    with both.page() as handle:
        for x in inputs(sim, 3):
            both.agree(lambda model, x=x: model(x).detach())
            loss = both.host(x).square().mean()
            with handle.optimizer_step(optimizer) if meanwhile else nullcontext():
                loss.backward()
            if not meanwhile:
                optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(list(both.there.parameters()), parameters)


def test_a_fused_step_whose_closure_runs_the_model_is_in_the_next_pass(sim, pair):
    both = pair()
    (x,) = inputs(sim, 1)
    parameters = list(both.host.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, fused=True)

    def closure():
        optimizer.zero_grad()
        loss = both.host(x).square().mean()
        loss.backward()
        return loss

    with both.page(share=1):
        for _ in range(2):
            optimizer.step(closure)
            with torch.no_grad():
                torch._foreach_copy_(list(both.there.parameters()), parameters)
            assert_equal(home(both.host(x)), home(both.there(x)))


def test_gradients_add_up_and_keep_their_strides(sim, pair):
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(32, 32).t())
    both = pair(model)
    with both.page():
        both.train(*inputs(sim, 2))
        parameters = list(both.host.parameters())
        before = [p.grad for p in parameters]
        both.train(*inputs(sim, 2))
        assert all(p.grad is g for p, g in zip(parameters, before, strict=True))
        assert all(p.grad.stride() == p.stride() for p in parameters)
        assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in parameters)


def test_a_gradient_that_is_kept_is_not_written_over(sim, pair):
    both = pair()
    x, y = inputs(sim, 2)
    with both.page():
        both.train(x)
        kept = {p: (p.grad, p.grad.clone()) for p in both.host.parameters()}
        views = [p.grad.view(-1)[3:] for p in both.host.parameters()]
        both.host.zero_grad()
        both.host(y).sum().backward()
        assert all(torch.equal(gradient, copy) for gradient, copy in kept.values())
        del kept
        copies = [view.clone() for view in views]
        both.host.zero_grad()
        both.host(y).sum().backward()
        assert all(map(torch.equal, views, copies))


def test_what_is_frozen_sends_no_byte_to_the_host_also_from_later_on(sim, pair):
    model = transformer()
    for block in model[1:]:
        block.requires_grad_(False)
    model[-1].down.bias.requires_grad_(True)
    both = pair(model)
    x = inputs(sim)[0]
    with both.page():
        for later in (False, False, True):
            if later:
                for each in (both.host, both.there):
                    each[0].requires_grad_(False)
                    each[0].up.weight.requires_grad_(True)
            before_bytes = sim.copied_bytes("d2h")
            both.run(lambda model: model(x).sum().backward())
            copied_bytes = sim.copied_bytes("d2h") - before_bytes
            assert copied_bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad)
            assert both.gradients_differ() == []
        for each in (both.host, both.there):
            each.requires_grad_(True)
        both.train(x)


def test_a_frozen_model_gives_its_input_gradients_within_half_its_weights(sim, pair):
    def gradient(model):
        x = inputs(sim)[0].requires_grad_()
        model(x).sum().backward()
        return x.grad

    both = pair(transformer().requires_grad_(False))
    with both.page():
        for _ in range(2):
            before_bytes = sim.copied_bytes("d2h")
            both.run(gradient)
            assert sim.copied_bytes("d2h") == before_bytes
            both.agree(gradient)


@pytest.mark.sim_allocator("exact")
def test_it_trains_in_what_others_leave_free(sim, pair):
    both, staying, peak_bytes = pair(mlp(12)), [], []
    optimizers = {m: torch.optim.SGD(m.parameters(), lr=0.1) for m in (both.host, both.there)}

    def step(model, x):
        sim.reset_peak()
        before_bytes = sim.allocated_bytes
        loss = train(model, optimizers[model], x)
        peak_bytes.append(sim.peak_bytes - before_bytes)
        return loss

    batches = inputs(sim, 16)
    expected = [step(both.there, x) for x in batches]
    memory = sim.allocated_bytes + max(peak_bytes) + both.weight_bytes // 2
    sim.budget_bytes = memory
    with page(both.host, sim.device, 1, budget="auto", training=True) as handle:
        for number, x in enumerate(batches):
            assert same(step(both.host, x), expected[number])
            staying.append(handle.report().resident_bytes)
            # For some steps another process has a part of what is free beside what a step needs.
            sim.budget_bytes = memory - (3 < number < 7) * both.weight_bytes // 4
    assert both.gradients_differ() == both.values_differ() == []
    assert sim.n_ooms == 0
    assert min(staying[5:8]) < staying[4]
    assert min(staying[5:8]) < staying[-1]
