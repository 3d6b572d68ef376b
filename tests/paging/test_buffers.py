"""What a paged forward assigns to its buffers is what the plain model has afterwards."""

import copy

import pytest
import torch
from torch import nn

from tenure.paging import page

from .support import assert_equal, home

WIDTH = 8


def late_write(module, x):
    state = module.state * 0.5
    module.state = state
    state.add_(x.mean(0))


def late_write_through_a_view(module, x):
    rows = torch.stack([module.state, x.mean(0)])
    module.state = rows[0]
    rows.mul_(2).add_(1)


def a_view_of_itself(module, x):
    module.state.copy_(x.mean(0))
    module.state = module.state.flip(0)
    module.square = module.square.t()
    module.square.add_(x.mean(0))
    module.state = module.state.view(-1).detach()
    module.state.add_(1)


def registered_again(module, x):
    state = torch.zeros_like(module.state)
    module.register_buffer("state", state)
    state.add_(x.mean(0))
    del module.square
    module.register_buffer("square", torch.ones(WIDTH, WIDTH, device=x.device))


def of_tied_buffers(module, x):
    state = module.twin * 0.5
    module.twin = state
    state.add_(x.mean(0))
    module.state.sub_(module.other_twin)


def of_another_shape(module, x):
    module.state = module.state + x.mean(0)
    module.square = torch.cat([module.square, x])
    module.state = module.state * module.square.mean()


class Layer(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.out = way, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))
        self.register_buffer("square", torch.arange(64.0).view(WIDTH, WIDTH))
        self.register_buffer("twin", torch.ones(WIDTH))
        self.register_buffer("other_twin", self.twin)

    def forward(self, x):
        with torch.no_grad():
            self.way(self, x.detach())
        return self.out(x) + self.state + self.square.sum(0)


class Twice(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layers, self.seen = nn.ModuleList([Layer(way), Layer(way)]), []

    def forward(self, x):
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x) / 100
        with torch.no_grad():  # after the module has returned
            self.layers[1].state.add_(1)
        self.seen = [self.state_dict()["layers.1.state"].clone()]
        return x


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "way",
    [
        late_write,
        late_write_through_a_view,
        a_view_of_itself,
        registered_again,
        of_tied_buffers,
        of_another_shape,
    ],
)
def test_buffers_and_outputs_are_those_of_the_plain_model(sim, way, trains):
    model, x = Twice(way), torch.randn(4, WIDTH, device=sim.device)
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.to(sim.device)
        layer.other_twin = layer.twin
    with (
        page(model, sim.device, 1, budget="12KiB", training=trains),
        torch.set_grad_enabled(trains),
    ):
        for _ in range(3):
            output, expected = model(x), plain(x)
            assert torch.equal(output, expected)
            assert model.seen[0].device.type == "cpu"
            assert torch.equal(model.seen[0], plain.seen[0].cpu())
            assert_equal(home(model.state_dict()), home(plain.state_dict()))
            if trains:
                (output.sum() + expected.sum()).backward()
    if trains:
        gradients = [[p.grad.cpu() for p in each.parameters()] for each in (model, plain)]
        torch.testing.assert_close(*gradients)


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.register_buffer("state", torch.ones(WIDTH))

    def forward(self, x):
        for _ in range(3):
            self.state = self.state.clone() * self.weight + x
        return self.state.sum()


def test_gradients_pass_through_what_was_assigned(sim):
    model, x = Recurrence(), torch.ones(WIDTH, device=sim.device)
    plain = copy.deepcopy(model)
    with page(model, sim.device, training=True):
        model(x).backward()
    plain(x.cpu()).backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert torch.equal(model.state, plain.state)
