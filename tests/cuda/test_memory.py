"""Budgets, retries and the line profiler, by the device's own account of its memory."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from tenure.adaptive import NoBatchsizeCache, batch, memory_budget, oom_info, step
from tenure.profiler import LineProfiler

from .conftest import MIB


def shown(n_bytes):
    return f"{n_bytes / MIB:.1f} MiB"


def test_a_budget_holds_on_a_fragmented_cache(rig, tell):
    blocks = [rig.bytes(4 * MIB) for _ in range(100)]
    kept = blocks[::5]
    del blocks
    reserved_bytes, made = rig.reserved_bytes(), []
    with memory_budget("8MiB", rig.device) as budget:
        for _ in range(100):
            try:
                made.append(rig.bytes(MIB))
            except torch.OutOfMemoryError:
                break
    tell(f"8 MiB let {len(made)} MiB through, {shown(reserved_bytes)} reserved; peak {budget!r}")
    assert len(made) == 8
    assert len(kept) == 20


@pytest.mark.parametrize(
    ("limit", "n_bytes"), [("12MiB", 2 * MIB), ("1MiB", 1024), ("21MiB", 21 * MIB)]
)
def test_a_budget_lets_through_what_fits_whatever_segments_it_takes(rig, tell, limit, n_bytes):
    with memory_budget(limit, rig.device) as budget:
        kept = rig.bytes(n_bytes)
        live_bytes = budget.live_bytes
    tell(f"{n_bytes} bytes within {limit}: {live_bytes} live, {shown(rig.reserved_bytes())} held")
    assert kept.nbytes <= live_bytes <= kept.nbytes + MIB  # up to so much is not split off


def test_a_step_that_ran_out_of_memory_has_the_gradients_of_the_whole_batch(rig, tell):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1)).double().to(rig.device)
    x = torch.randn(8192, 256, dtype=torch.float64, device=rig.device)
    whole = copy.deepcopy(model)
    loss = whole(x).square().mean()
    loss.backward()
    loss = loss.item()
    with rig.limited(60 * MIB):
        result = step(lambda x: model(x).square().mean(), x, cache_type=NoBatchsizeCache)
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    differences = [((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in pairs]
    tell(f"{result.attempts} attempts, by {result.micro_batch}, gradients off {max(differences):g}")
    assert result.attempts > 1
    assert result.loss.item() == pytest.approx(loss, rel=1e-10)
    assert max(differences) < 1e-10


def test_a_batch_comes_down_to_what_fits_and_leaves_nothing(rig, tell):
    at_rest = rig.module.memory_allocated(rig.device)
    seen = []

    @batch(initial_batchsize=256, cache_type=NoBatchsizeCache)
    def take(size):
        seen.append(size)
        return len([rig.bytes(MIB) for _ in range(size)])

    with rig.limited(100 * MIB):
        size = take()
    gc.collect()
    tell(f"sizes {seen}")
    assert 50 <= size <= 100
    assert rig.module.memory_allocated(rig.device) == at_rest


def test_lines_add_up_to_what_the_allocator_says(rig, tell):
    model = nn.Linear(256, 256).to(rig.device)
    x = torch.ones(64, 256, device=rig.device)

    def work():
        loss = model(x).pow(2).sum()
        loss.backward()
        model.zero_grad()

    work()
    before = rig.module.memory_stats(rig.device)
    with LineProfiler(work, nn.Linear.forward, device=rig.device) as profiler:
        work()
    after = rig.module.memory_stats(rig.device)
    truth = {
        figure: after[f"allocated_bytes.all.{figure}"] - before[f"allocated_bytes.all.{figure}"]
        for figure in ("allocated", "freed")
    }
    ours = {
        figure: sum(getattr(record, f"{figure}_bytes") for record in profiler.records)
        for figure in truth
    }
    tell(f"lines {ours}, allocator {truth}")
    assert ours == truth
    assert ours["allocated"] > 0


def test_the_lines_of_two_threads_have_each_its_own_bytes_or_say_that_they_may_not(rig, tell):
    turns = threading.Barrier(2)

    def work():
        turns.wait()
        kept = [rig.bytes(1000 * 512) for _ in range(4)]
        turns.wait()
        return kept

    with LineProfiler(work, device=rig.device) as profiler:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    booked = sum(record.allocated_bytes for record in profiler.records)
    exact = all(record.exact for record in profiler.records)
    truth = 2 * 4 * 1000 * 512
    tell(f"{booked} booked of {truth}, exact={exact}")
    assert booked == truth or not exact


@pytest.mark.parametrize(
    "conf", ["backend:native", "backend:cudaMallocAsync", "expandable_segments:True"]
)
def test_the_out_of_memory_error_of_every_allocator_is_understood(rig, tell, conf):
    if conf != "backend:native":
        rig.needs_a_gpu("the simulated device has CUDA's own allocator alone")
    found = rig.run("too_large", PYTORCH_ALLOC_CONF=conf)
    tell(
        f"{conf}: {found['kind'] if found['is_oom'] else 'not recognised: ' + found['text']}"
        f" on {found.get('device')}, {found.get('bytes')} bytes; retried down to {found['retried']}"
    )
    assert found["is_oom"], found["text"]
    assert (found["kind"], found["device"]) == ("device", str(rig.device))
    assert found["bytes"] == pytest.approx(found["asked_bytes"], rel=0.01)
    assert found["retried"] < 1 << 18


def test_a_library_handle_that_gets_no_memory_is_understood(rig, tell):
    rig.needs_a_gpu("the simulated device has no libraries")
    found = rig.run("full_device")
    tell(f"{found['kind']}: {found['text'][:100]!r}")
    assert found["kind"] is not None or not found["text"]  # it may have found a little


def test_the_simulated_allocator_keeps_the_rules_of_the_real_one(rig, tell):
    found = rig.run("replay_allocations")
    tell(str(found))
    assert found["at"] is None, found


def test_an_error_of_another_kind_is_none_of_memory(rig, tell):
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, device=rig.device) @ torch.ones(3, device=rig.device)
    tell(str(caught.value)[:80])
    assert oom_info(caught.value) is None
