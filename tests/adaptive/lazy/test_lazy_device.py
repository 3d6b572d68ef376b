"""Recorded tensors on a device whose memory runs out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import lazy

pytestmark = pytest.mark.usefixtures("quiet")
SAMPLES = 4096


class Model(nn.Module):
    """A model with a scale that is computed beside the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.layers(x) * self.scale.exp()


def _on(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 16, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    return Model().double().to(device), x.to(device), y.to(device)


def _gradients(model):
    return [p.grad.cpu() for p in model.parameters()]


def test_it_retries_where_less_is_free_than_before(sim):
    sim(budget="64MiB")
    # computed once there is a device: autograd counts them when it first runs
    plain, x, y = _on("cpu")
    F.cross_entropy(plain(x), y).backward()
    model, x, y = _on(sim.device)
    F.cross_entropy(model(lazy(x)), y).backward()
    model.zero_grad()
    taken = torch.empty(56 << 20, dtype=torch.uint8, device=sim.device)
    F.cross_entropy(model(lazy(x)), y).backward()
    assert sim.n_ooms > 0
    torch.testing.assert_close(_gradients(model), _gradients(plain), rtol=1e-11, atol=1e-14)
    assert taken.numel()


def test_autocast_holds_for_a_batch_that_the_program_moves_to_the_device(sim):
    sim()
    model, found = Model().to(sim.device), []
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for wrap in (lambda value: value, lazy):
        model.zero_grad()
        with torch.autocast(torch.device(sim.device).type, torch.bfloat16):
            loss = model(wrap(x).to(sim.device)).square().mean()
        loss.backward()
        found.append(_gradients(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_calls_with_indices_are_tried_and_split(sim):
    sim(budget="64MiB")
    table, head = nn.Embedding(8, 4096, device=sim.device), nn.Linear(4096, 1, device=sim.device)
    ids = torch.arange(SAMPLES, device=sim.device) % 8
    head(table(lazy(ids)).relu()).sum().backward()
    assert sim.n_ooms > 0
