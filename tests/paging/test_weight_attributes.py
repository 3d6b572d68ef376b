"""What a program sets on a weight as an attribute, in the forward or between two calls."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.paging import page

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

WIDTH = 16
BUDGETS = [None, "auto", 2048]
ways = pytest.mark.parametrize("budget", BUDGETS, ids=["all", "auto", "least"])


class Scaled(nn.Linear):
    """Reads an attribute of its weight."""

    def forward(self, x):
        return super().forward(x) * self.weight.scale


class Binary(nn.Linear):
    """Computes with signs, and keeps on the weight the numbers that the optimizer steps."""

    def forward(self, x):
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data.copy_(self.weight.org.sign())
        return F.linear(x, self.weight, self.bias)


def layers(kind):
    torch.manual_seed(0)
    return nn.Sequential(*[kind(WIDTH, WIDTH) for _ in range(3)])


def step_as_binary(model, x, optimizer):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for each in model:
        each.weight.data.copy_(each.weight.org)
    optimizer.step()
    for each in model:
        each.weight.org.copy_(each.weight.data.clamp_(-1, 1))
    return loss.item()


@ways
@pytest.mark.parametrize("training", [False, True])
def test_an_attribute_that_is_set_between_calls_is_seen_in_the_next(sim, budget, training):
    model = layers(Scaled)
    plain = copy.deepcopy(model).to(sim.device)
    x = torch.ones(2, WIDTH, device=sim.device)
    with page(model, sim.device, 1, budget=budget, training=training):
        for scale in (1.0, 2.0, 0.5):
            for each in (*model, *plain):
                each.weight.scale = scale
            for grad in {False, training}:
                with torch.set_grad_enabled(grad):
                    assert model(x).equal(plain(x))
            del model[0].weight.scale
            with pytest.raises(AttributeError, match="scale"), torch.no_grad():
                model(x)


@ways
def test_an_attribute_that_is_set_in_the_forward_stays_on_the_weight(sim, budget):
    model = layers(Binary)
    plain = copy.deepcopy(model).to(sim.device)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
    x = torch.randn(4, WIDTH).to(sim.device)
    with page(model, sim.device, 1, budget=budget, training=True):
        for _ in range(3):
            mine = step_as_binary(model, x, optimizers[0])
            assert mine == step_as_binary(plain, x, optimizers[1])
        assert [*vars(model[0].weight)] == ["org"]
        assert not vars(model[0].bias)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.equal(other.cpu())
