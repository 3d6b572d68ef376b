"""memory_budget on an accelerator, the simulated one: counted, by device, however it caches."""

import gc

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, NoBatchsizeCache, memory_budget, statistics, step

from ..attempt.failures import on_sim
from .test_budget import columns_loss

MIB = 1 << 20
# CUDA's has a fraction, and rounds
exact = pytest.mark.sim_allocator("exact")


@exact
def test_only_the_memory_of_the_host_counts_for_a_budget_of_the_cpu(sim):
    with memory_budget(100, "cpu") as host, memory_budget(100, sim.device) as device:
        kept = on_sim(90), torch.ones(20)
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
    kept = [on_sim(4 * MIB) for _ in range(100)][::5]
    assert cuda_like.reserved_bytes == 400 * MIB
    with memory_budget("8MiB", "sim") as budget:
        made = [on_sim(4 * MIB), on_sim(4 * MIB)]
        with pytest.raises(torch.OutOfMemoryError, match=r"memory_budget has a limit of 8\.0 MiB"):
            on_sim(1)
        assert cuda_like.allocated_bytes == (20 + 2) * 4 * MIB
        assert budget.live_bytes == budget.peak_bytes == 8 * MIB
    del kept, made


def test_rounding_to_blocks_is_the_allocators_and_not_the_programs(cuda_like):
    with memory_budget(1000, "sim") as budget:
        kept = [on_sim(1) for _ in range(1000)]
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


# --- of two devices the one that is meant is the one that the work is on, whichever is current


@pytest.fixture
def two(sim):
    return sim(devices=2)


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


# --- while a graph is captured: what is refused by name, what runs as it is, what is left alone


@pytest.fixture
def graph(sim, captures):
    sim(allocator="cuda", budget="64MiB")
    return sim.module.CUDAGraph()


def test_a_step_and_a_budget_are_refused_by_name_and_the_capture_goes_on(sim, graph):
    model = nn.Linear(4, 1).to(sim.device)
    x = torch.ones(4, 4).to(sim.device)
    with sim.module.graph(graph):
        with pytest.raises(AdaptiveUsageError, match=r"^step\(\) was called while a"):
            step(lambda batch: model(batch).mean(), x)
        budget = memory_budget("1MiB", "sim")
        with pytest.raises(AdaptiveUsageError, match=r"not yet open> was entered while a graph is"):
            budget.__enter__()
        with memory_budget("1MiB"):
            x.add_(1)
    graph.replay()
    assert x.cpu().tolist() == [[2.0] * 4] * 4
    assert model.weight.grad is None
    with budget:
        pass


def guarded(sim, function):
    def call(*args, **kwargs):
        assert not sim.module.is_current_stream_capturing()
        return function(*args, **kwargs)

    return call


def test_an_out_of_memory_error_goes_on_untouched_and_retries_work_after_the_capture(
    sim, graph, monkeypatch
):
    for name in ("synchronize", "empty_cache", "memory_snapshot"):
        monkeypatch.setattr(sim.module, name, guarded(sim, getattr(sim.module, name)))
    monkeypatch.setattr(gc, "collect", guarded(sim, gc.collect))
    f = adaptive.batch(initial_batchsize=64, restore_rng=True)(lambda size: on_sim(size * 2 << 20))
    statistics().reset()
    with sim.module.graph(graph):
        with pytest.raises(torch.OutOfMemoryError, match=r"^sim:0 out of memory") as caught:
            f()
        assert sim.module.is_current_stream_capturing()
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (statistics().attempts, statistics().retries, statistics().shrinks) == (1, 0, 0)
    assert adaptive.simple.batch(lambda size: on_sim(size << 20).numel(), 128) == 64 << 20
