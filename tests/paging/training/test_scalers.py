"""A scaler of gradients whose scale is on the device, and gradients of a paged model at home."""

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import _MultiDeviceReplicator

from .blocks import inputs, transformer

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "AdamW, fused on the host": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-4, fused=at_home(p)),
}


def at_home(parameters):
    return parameters[0].device.type == "cpu"


def train(model, make, sim, *, clip=False):
    """Some steps, in one of which a gradient is infinite; the scales and values after each."""
    model.eval()
    optimizer = make(list(model.parameters()))
    scaler = torch.amp.GradScaler(sim.device.type, init_scale=1024.0, growth_interval=2)
    found = []
    for n, x in enumerate(inputs(sim, 5)):
        optimizer.zero_grad()
        loss = model(x.double()).square().mean() * (torch.inf if n == 1 else 1)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        values = [p.detach().cpu().clone() for p in model.parameters()]
        found.append((scaler.get_scale(), values))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scale_on_the_device_scales_as_that_of_a_whole_model(sim, pair, name, clip):
    torch.manual_seed(0)
    both = pair(transformer()[:3].double())
    with both.page():
        ours, theirs = both.run(lambda m: train(m, OPTIMIZERS[name], sim, clip=clip))
    assert [scale for scale, _ in ours] == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
    assert [scale for scale, _ in theirs] == [scale for scale, _ in ours]
    values = [values for _, values in ours]
    assert all(map(torch.equal, values[0], values[1]))
    assert not any(map(torch.equal, values[1], values[2]))
    for mine, other in zip(values, (values for _, values in theirs), strict=True):
        assert all(map(torch.allclose, mine, other))


def test_a_scale_is_asked_as_before_when_no_model_is_paged_for_training(sim, pair):
    before = vars(_MultiDeviceReplicator)["get"]
    one, other = pair(), pair()
    with one.page():
        with other.page():
            pass
        assert vars(_MultiDeviceReplicator)["get"] is not before
    assert vars(_MultiDeviceReplicator)["get"] is before
