"""memory_budget on an accelerator, the simulated one: counted, by device, however it caches."""

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, memory_budget

from .test_budget import columns_loss

MIB = 1 << 20
# CUDA's has a fraction, and rounds
exact = pytest.mark.sim_allocator("exact")


def on(device, n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


@exact
def test_only_the_memory_of_the_host_counts_for_a_budget_of_the_cpu(sim):
    with memory_budget(100, "cpu") as host, memory_budget(100, sim.device) as device:
        kept = on("sim", 90), on("cpu", 80)
        assert (host.live_bytes, device.live_bytes) == (80, 90)
        with pytest.raises(torch.OutOfMemoryError, match=r"^cpu out of memory"):
            kept[0].cpu()
        with pytest.raises(torch.OutOfMemoryError, match=r"^sim:0 out of memory"):
            kept[1].to(sim.device)
        assert (host.live_bytes, device.live_bytes, sim.allocated_bytes) == (80, 90, 90)


@exact
def test_a_training_step_counts_what_the_device_has_allocated(sim):
    with memory_budget("1MiB", "sim") as budget:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(sim.device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(8, 16).to(sim.device)).square().mean().backward()
            optimizer.step()
            assert budget.live_bytes == sim.allocated_bytes


@exact
def test_a_sum_of_gradients_on_a_thread_of_the_engine_counts_once(sim):
    """Autograd adds out of place while a mode is open: the budget counts as if none were."""
    peaks = []
    for device in ("cpu", "sim"):
        weight = torch.ones(16, 64, requires_grad=True, device=device)
        with memory_budget("1MiB", device) as budget:
            columns_loss(weight, device).backward()
        peaks.append(budget.peak_bytes)
    assert peaks[0] == peaks[1]


@pytest.fixture
def cuda_like(sim):
    sim(allocator="cuda", budget=8 << 30)
    return sim


def test_a_fragmented_cache_lends_a_budget_nothing(cuda_like):
    kept = [on("sim", 4 * MIB) for _ in range(100)][::5]
    assert cuda_like.reserved_bytes == 400 * MIB
    with memory_budget("8MiB", "sim") as budget:
        made = [on("sim", 4 * MIB), on("sim", 4 * MIB)]
        with pytest.raises(torch.OutOfMemoryError, match=r"memory_budget has a limit of 8\.0 MiB"):
            on("sim", 1)
        assert cuda_like.allocated_bytes == (20 + 2) * 4 * MIB
        assert budget.live_bytes == budget.peak_bytes == 8 * MIB
    del kept, made


def test_rounding_to_blocks_is_the_allocators_and_not_the_programs(cuda_like):
    with memory_budget(1000, "sim") as budget:
        kept = [on("sim", 1) for _ in range(1000)]
        assert (budget.live_bytes, cuda_like.allocated_bytes) == (1000, 512 * 1000)
    del kept


def test_a_device_with_too_small_an_index_is_named(sim):
    with pytest.raises(AdaptiveUsageError, match="'sim:1': this machine has 1 of its type"):
        memory_budget(500, "sim:1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_budget_on_cuda_is_exact():
    before = torch.cuda.get_per_process_memory_fraction()
    with memory_budget("256MiB", "cuda") as budget:
        kept = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="memory_budget has a limit of 256"):
            torch.empty(160 * MIB, dtype=torch.uint8, device="cuda")
        assert budget.live_bytes == kept.nbytes
    assert torch.cuda.get_per_process_memory_fraction() == before
