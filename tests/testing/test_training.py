import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

OPTIMIZERS = [
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Rprop", "ASGD"),
    *("Adamax", "Adafactor"),
]
FUSED = ["SGD", "AdamW", "Adagrad"]


def train(model, x, make_optimizer, **options):
    optimizer = make_optimizer(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_as_on_the_cpu(sim, name):
    torch.manual_seed(0)
    start, x, make = nn.Linear(3, 2), torch.randn(4, 3), getattr(torch.optim, name)
    model = copy.deepcopy(start)
    train(model, x, make)
    for options in ({}, {"foreach": False}, *([{"fused": True}] if name in FUSED else [])):
        twin = copy.deepcopy(start).to(sim.device)
        train(twin, x.to(sim.device), make, **options)
        torch.testing.assert_close(twin.weight.cpu(), model.weight, rtol=1e-4, atol=1e-5)


def test_an_optimizer_keeps_its_state_on_the_device_and_restores_it(sim):
    layer = nn.Linear(3, 2).to(sim.device)
    x = torch.randn(4, 3, device=sim.device)
    optimizer = train(layer, x, torch.optim.AdamW)
    moments = optimizer.state[layer.weight]["exp_avg"]
    assert moments.device == sim.device
    fresh = torch.optim.AdamW(layer.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(fresh.state[layer.weight]["exp_avg"], moments)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_same_dropout(sim, reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).to(sim.device)
    x = torch.randn(4, 8, device=sim.device, requires_grad=True)
    state = sim.module.get_rng_state()
    block(x).sum().backward()
    expected, x.grad = x.grad, None
    sim.module.set_rng_state(state)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, expected)
