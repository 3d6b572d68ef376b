"""The device that is meant is the one the work is on, whichever is current."""

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure.adaptive import NoBatchsizeCache, memory_budget, step

from ..attempt.failures import oom


@pytest.fixture
def two(sim):
    return sim(devices=2)


def numbers_of_the_second_device(n):
    return nn.functional.dropout(torch.rand(n, dtype=torch.float64, device="sim:1"))


@pytest.mark.parametrize("current", [0, 1])
def test_a_retried_part_draws_what_it_had_drawn_on_every_device(two, current):
    def run(largest):
        @adaptive.batch(initial_batchsize=4, restore_rng=True, cache_type=NoBatchsizeCache)
        def draw(batchsize):
            drawn = [
                torch.rand(8, device="sim:0").cpu(),
                numbers_of_the_second_device(8).cpu(),
            ]
            if batchsize > largest:
                oom()
            return drawn

        torch.manual_seed(0)
        return draw()

    with two.module.device(current):
        plain, retried = run(4), run(1)
    assert all(torch.equal(*pair) for pair in zip(plain, retried, strict=True))


class Dropped(nn.Module):
    """A layer on one device, dropout on another."""

    def __init__(self, weights, dropout):
        super().__init__()
        self.dropout = dropout
        self.lin = nn.Linear(6, 4).double().to(weights)

    def forward(self, x):
        x = self.lin(x.to(self.lin.weight.device)).tanh()
        return nn.functional.dropout(x.to(self.dropout))


def spread(outputs):
    return outputs.logsumexp(0).sum()


@pytest.mark.parametrize(("weights", "place"), [("sim:0", "cpu"), ("sim:1", "sim:0")])
def test_a_second_pass_finds_the_dropout_of_the_first_on_the_second_device(two, weights, place):
    """Gradients are exact only if each part drops in both passes what it dropped in the first."""
    x = torch.randn(8, 6, dtype=torch.float64).to(place)
    net = Dropped(weights, "sim:1")
    torch.manual_seed(0)
    spread(torch.cat([net(part) for part in x.split(2)])).backward()
    expected, net.lin.weight.grad = net.lin.weight.grad, None
    torch.manual_seed(0)
    step(net, x, loss=spread, maximum=2, cache_type=NoBatchsizeCache, verify=False)
    torch.testing.assert_close(net.lin.weight.grad, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("allocator", ["exact", "cuda"])
def test_a_retry_finds_room_on_the_second_device_and_leaves_the_first_alone(two, allocator, caplog):
    two(devices=2, allocator=allocator, budget="64MiB")
    kept = torch.ones(1 << 22, device="sim:1")

    @adaptive.batch(initial_batchsize=64, cache_type=NoBatchsizeCache)
    def fill(batchsize):
        return torch.ones(batchsize << 20, device="sim:1").shape[0]

    assert 1 <= fill() >> 20 <= 12
    assert "ran out of sim:1 memory" in caplog.text
    assert (two.contexts, two.n_allocations, kept.device.index) == ({1}, 0, 1)


@pytest.mark.parametrize(("current", "named"), [(0, "sim:1"), (1, "sim")])
def test_a_budget_bounds_the_device_that_is_meant(two, current, named):
    two(devices=2, budget="512MiB")
    with two.module.device(current), memory_budget("4MiB", named):
        torch.ones(1 << 22, device="sim:0")
        with pytest.raises(torch.OutOfMemoryError, match="on sim:1 of which"):
            torch.ones(1 << 22, device="sim:1")
    torch.ones(1 << 22, device="sim:1")
