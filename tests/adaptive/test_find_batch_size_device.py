"""The largest batch that fits on a device, whatever its allocator makes of what is asked for."""

import pytest
import torch

from tenure.adaptive import find_batch_size

from .finding import Training, network

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.exhaustive
@pytest.mark.parametrize("allocator", ["exact", "cuda"])
@pytest.mark.parametrize("width", [64, 192])
def test_on_a_device_95_percent_are_found_with_three_failures(sim, allocator, width):
    sim(budget="48MiB", allocator=allocator)
    train = Training(network(sim.device, width), width)
    resting_bytes = sim.allocated_bytes
    found = find_batch_size(train, high=1 << 20, margin=0)
    assert sim.n_ooms <= 3
    assert len(train.failed) <= 3
    assert found in train.sizes
    assert sim.allocated_bytes == resting_bytes
    torch.get_device_module(sim.device).empty_cache()
    for factor in (1.06, 1.12, 1.3):
        with pytest.raises(torch.OutOfMemoryError):
            train(int(found * factor) + 1)
        train.net.zero_grad()
        torch.get_device_module(sim.device).empty_cache()


def test_a_budget_on_a_device_counts(sim):
    sim(budget="1GiB")
    train = Training(network(sim.device))
    found = find_batch_size(train, high=1 << 20, budget="4MiB", margin=0)
    assert len(train.failed) <= 3
    assert found < 20_000
    assert sim.peak_bytes < 6 << 20
