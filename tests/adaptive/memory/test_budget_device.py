"""memory_budget on an accelerator without a fraction, the simulated one: counted, by device."""

import pytest
import torch
from torch import nn

from tenure.adaptive import memory_budget

from .test_budget import columns_loss

pytestmark = pytest.mark.sim_allocator("exact")  # CUDA's has a fraction, and rounds


def on(device, n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def test_only_the_memory_of_the_host_counts_for_a_budget_of_the_cpu(sim):
    with memory_budget(100, "cpu") as host, memory_budget(100, sim.device) as device:
        kept = on("sim", 90), on("cpu", 80)
        assert (host.live_bytes, device.live_bytes) == (80, 90)
        with pytest.raises(torch.OutOfMemoryError, match=r"^cpu out of memory"):
            kept[0].cpu()
        with pytest.raises(torch.OutOfMemoryError, match=r"^sim:0 out of memory"):
            kept[1].to(sim.device)
        assert (host.live_bytes, device.live_bytes, sim.allocated_bytes) == (80, 90, 90)


def test_a_training_step_counts_what_the_device_has_allocated(sim):
    with memory_budget("1MiB", "sim") as budget:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(sim.device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(8, 16).to(sim.device)).square().mean().backward()
            optimizer.step()
            assert budget.live_bytes == sim.allocated_bytes


def test_a_sum_of_gradients_on_a_thread_of_the_engine_counts_once(sim):
    """Autograd adds out of place while a mode is open: the budget counts as if none were."""
    peaks = []
    for device in ("cpu", "sim"):
        weight = torch.ones(16, 64, requires_grad=True, device=device)
        with memory_budget("1MiB", device) as budget:
            columns_loss(weight, device).backward()
        peaks.append(budget.peak_bytes)
    assert peaks[0] == peaks[1]
