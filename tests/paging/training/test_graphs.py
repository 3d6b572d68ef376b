"""What programs do with graphs and gradients is the same where the weights are paged."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tenure.paging import page

from ..models import build
from .blocks import LARGE, WIDTH, inputs, transformer
from .conftest import either_way, same

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

_KINDS = ["attention", "decoder", "functional", "lstm", "parametrized", "resnet", "shared", "tied"]


@pytest.mark.parametrize("activations", [None, "host"])
@pytest.mark.parametrize("name", _KINDS)
def test_models_of_every_kind_get_the_gradients_of_a_plain_one(
    sim, pair, monkeypatch, name, activations
):
    monkeypatch.setattr("tenure.paging._activations.SMALL_BYTES", 1)
    model, args, kwargs = build(name)
    model.train()
    both = pair(model)
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(sim.device), (args, kwargs)
    )

    def total(outputs):
        leaves = torch.utils._pytree.tree_leaves(outputs)
        return sum(each.square().sum() for each in leaves)

    with both.page(1.3 if name == "lstm" else 0.75, activations=activations):
        for _ in range(2):
            both.run(lambda model: total(model(*args, **kwargs)).backward())
            # what is fetched several times in a forward is added up in another order
            assert both.gradients_differ() == [] or name == "shared"
            pairs = zip(both.host.parameters(), both.there.parameters(), strict=True)
            for p, q in pairs:
                assert (p.grad is None) is (q.grad is None)
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad.cpu())
    assert both.values_differ() == []


def test_gradients_add_up_in_the_same_tensors_where_there_are_some(sim, halved):
    before = []
    for x in inputs(sim, 3):
        halved.run(lambda model, x=x: model(x).sum().backward())
        assert halved.gradients_differ() == []
        before = before or [p.grad for p in halved.host.parameters()]
    assert all(p.grad is g for p, g in zip(halved.host.parameters(), before, strict=True))


def test_a_gradient_that_is_kept_is_not_written_over(sim, halved):
    x, y = inputs(sim, 2)
    halved.run(lambda model: model(x).sum().backward())
    kept = {p: (p.grad, p.grad.clone()) for p in halved.host.parameters()}
    views = [p.grad.view(-1)[3:] for p in halved.host.parameters()]
    halved.host.zero_grad()
    halved.host(y).sum().backward()
    assert all(torch.equal(gradient, copy) for gradient, copy in kept.values())
    del kept
    copies = [view.clone() for view in views]
    halved.host.zero_grad()
    halved.host(y).sum().backward()
    assert all(map(torch.equal, views, copies))


@pytest.mark.exhaustive
@either_way
def test_a_graph_that_is_kept_gives_the_same_again_and_leaks_nothing(sim, halved):
    x = inputs(sim, 1, LARGE)[0]

    def twice(model):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="through the graph a second time"):
            loss.backward()

    halved.run(twice)
    assert halved.gradients_differ() == []
    halved.host.zero_grad()
    gc.collect()
    before_bytes = sim.allocated_bytes
    gc.disable()
    try:
        for keeps in (True, False, None):
            loss = halved.host(x).square().exp().sum()
            if keeps is not None:
                loss.backward(retain_graph=keeps)
            del loss
            assert sim.allocated_bytes == before_bytes
    finally:
        gc.enable()


def test_autograd_grad_of_parameters_and_of_inputs(sim, halved):
    def gradients(model):
        x = inputs(sim)[0].requires_grad_()
        loss = model(x).square().sum()
        return torch.autograd.grad(loss, [x, *model.parameters()])

    (mine, *ours), (theirs, *others) = halved.run(gradients)
    assert torch.equal(mine, theirs)
    assert all(map(same, ours, others))
    assert all(p.grad is None for p in halved.host.parameters())


@pytest.mark.parametrize("activations", [None, "host"])
def test_gradients_of_gradients(sim, pair, activations):
    both = pair(
        nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "12345"])
    )

    def penalty(model):
        x = inputs(sim, 1, LARGE)[0].requires_grad_()
        loss = model(x).square().mean()
        own = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        (loss + sum(each.square().sum().to(loss.device) for each in own)).backward()

    for share in (0.7, 2):
        both.host.zero_grad()
        both.there.zero_grad()
        with both.page(share, activations=activations):
            both.run(penalty)
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        pairs = zip(both.host.parameters(), both.there.parameters(), strict=True)
        # sums of several gradients are of another order, on the host
        assert all(torch.allclose(p.grad, q.grad.cpu(), rtol=1e-4, atol=1e-6) for p, q in pairs)


@pytest.mark.exhaustive
@either_way
def test_several_forwards_before_their_backward_passes(sim, halved):
    x, y, z = inputs(sim, 3, LARGE)

    def run(model):
        one, other = model(x).sum(), model(y).square().sum()
        one.backward()
        other.backward()

    halved.run(run)
    assert halved.gradients_differ() == []

    def run_together(model):
        (model(x).mean() + model(model(y)).square().mean() * model(z).mean()).backward()

    halved.run(run_together)
    pairs = zip(halved.host.parameters(), halved.there.parameters(), strict=True)
    assert all(torch.allclose(p.grad, q.grad.cpu(), rtol=1e-4, atol=1e-6) for p, q in pairs)


def test_hooks_of_tensors_and_of_their_accumulation_see_gradients_on_the_host(sim, halved):
    seen = {halved.host: [], halved.there: []}
    for model, told in seen.items():
        for p in model.parameters():
            p.register_hook(lambda g, told=told: told.append(g.cpu().clone()) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, told=told: told.append(p.grad.cpu()))
    halved.run(lambda model: model(inputs(sim)[0]).sum().backward())
    assert len(seen[halved.host]) == 2 * len(list(halved.host.parameters()))
    assert halved.gradients_differ() == []
    ours, theirs = ({tuple(t.flatten().tolist()) for t in told} for told in seen.values())
    assert ours == theirs


@pytest.mark.exhaustive
@either_way
def test_autocast(sim, halved):
    def run(model):
        with torch.autocast(sim.device.type, torch.bfloat16):
            loss = model(inputs(sim, 1, LARGE)[0]).square().mean()
        loss.backward()

    halved.run(run)
    assert halved.gradients_differ() == []


def test_a_graph_keeps_no_weight_and_no_model(sim, pair):
    both = pair()
    with both.page():
        # a graph that held weights would leave no room for those of the next
        losses = [both.host(inputs(sim)[0]).sum() for _ in range(3)]
        losses.clear()
    model = transformer()
    gone = weakref.ref(model)
    x = inputs(sim)[0]
    handle = page(model, sim.device, budget="200KiB", training=True)
    model(x).sum().backward()
    handle.unpage()
    del model, handle
    gc.collect()
    assert gone() is None


def test_parameters_that_are_frozen_later_get_no_more_gradients(sim, halved):
    x = inputs(sim)[0]
    for model in (halved.host, halved.there):
        model[3].requires_grad_(False)
        model[4].up.weight.requires_grad_(False)
    halved.run(lambda model: model(x).sum().backward())
    assert halved.gradients_differ() == []
    for model in (halved.host, halved.there):
        model.requires_grad_(True)
    halved.run(lambda model: model(x).sum().backward())
    assert halved.gradients_differ() == []
