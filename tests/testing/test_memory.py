"""Exact accounting: what is allocated, the most that was, and when an allocation must fail."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenure.testing import Rates

pytestmark = pytest.mark.sim_allocator("exact")
ON_SIM = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CUDA_FIGURES = {
    f"{name}.all.{figure}"
    for name in (
        *("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes"),
        *("reserved_bytes", "segment"),
    )
    for figure in ("current", "peak", "allocated", "freed")
}


def taken(sim, n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device=sim.device)


@ON_SIM
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60),
    budget_bytes=st.none() | st.integers(0, 20_000),
    unit=st.sampled_from([1, 512]),
)
def test_accounting_after_any_allocations_and_frees_equals_a_plain_sum(
    sim, steps, budget_bytes, unit
):
    sim(allocator="exact", budget=budget_bytes, round_to_bytes=unit)
    live, used_bytes, peak_bytes, n_failures = [], 0, 0, 0
    for is_free, number in steps:
        if is_free and live:
            gone = live.pop(number % len(live))
            used_bytes -= -(-gone.nbytes // unit) * unit
            del gone
            continue
        needed_bytes = -(-number // unit) * unit
        fits = budget_bytes is None or used_bytes + needed_bytes <= budget_bytes or not number
        if not fits:
            n_failures += 1
            with pytest.raises(torch.OutOfMemoryError):
                taken(sim, number)
            continue
        live.append(taken(sim, number))
        used_bytes += needed_bytes
        peak_bytes = max(peak_bytes, used_bytes)
    assert sim.allocated_bytes == sim.reserved_bytes == used_bytes
    assert sim.requested_bytes == sum(each.nbytes for each in live)
    assert (sim.peak_bytes, sim.n_ooms) == (peak_bytes, n_failures)
    sim.reset_peak()
    assert sim.peak_bytes == used_bytes


@ON_SIM
@given(
    allocator=st.sampled_from(["exact", "cuda"]),
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=20),
    data=st.data(),
)
def test_the_chosen_allocation_fails_and_no_other(sim, allocator, sizes, data):
    """An allocation without bytes is none."""
    counted = [i for i, n_bytes in enumerate(sizes) if n_bytes]
    chosen = data.draw(st.integers(1, len(counted) + 1))
    sim(allocator=allocator, fail_at=chosen)
    failed = []
    for i, n_bytes in enumerate(sizes):
        try:
            taken(sim, n_bytes)
        except torch.OutOfMemoryError as error:
            failed.append((i, str(error)))
    assert [i for i, _ in failed] == counted[chosen - 1 : chosen]
    assert all(text.endswith("was planted with fail_at().") for _, text in failed)
    assert sim.failure_is_planted is (not failed)
    assert sim.n_allocations == len(counted) - len(failed)


def test_the_error_names_the_device_and_every_size_exactly(sim):
    sim(budget=4096)
    kept = taken(sim, 3000)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        taken(sim, 2000)
    assert str(caught.value) == (
        "sim:0 out of memory. Tried to allocate 1.95 KiB (2000 bytes). sim:0 has a budget of"
        " 4.00 KiB (4096 bytes) of which 1.07 KiB (1096 bytes) is free; 2.93 KiB (3000 bytes) is"
        " allocated by PyTorch, and 0 bytes waits for other streams."
    )
    assert kept.nbytes == sim.allocated_bytes


def test_an_allocation_that_even_the_host_has_no_room_for_leaves_nothing(sim):
    with pytest.raises(torch.OutOfMemoryError, match="no memory that could stand for it"):
        torch.empty(1 << 58, device=sim.device)
    assert sim.allocated_bytes == sim.peak_bytes == sim.n_allocations == 0
    assert sim.n_ooms == 1


def test_a_full_pool_waits_for_recorded_streams_before_it_fails(sim):
    sim(budget=100, rates=Rates(memory_bytes_per_s=1e3))
    x, side = taken(sim, 80), sim.module.Stream()
    with sim.module.stream(side):
        sim.launch_kernel(1.0, writes=[x])
    x.record_stream(side)
    del x
    assert sim.allocated_bytes == 0
    assert sim.module.memory_stats()["active_bytes.all.current"] == 80
    waits = sim.host_waits
    assert taken(sim, 90).nbytes == 90
    assert sim.module.memory_stats()["active_bytes.all.current"] == 0
    assert sim.host_waits == waits + 1
    assert sim.module.memory_stats()["num_alloc_retries"] == 1
    assert sim.n_ooms == 0


def test_a_view_keeps_the_whole_storage_and_a_caught_failure_no_temporary(sim):
    x = torch.zeros(100, device=sim.device)
    view = x[3:5].view(2, 1)
    del x
    assert sim.allocated_bytes == 400
    sim.fail_at(3)
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        torch.var_mean(view + 1)
    assert caught.tb is not None
    assert sim.allocated_bytes == 400
    del view
    assert sim.allocated_bytes == 0


def test_tensors_from_before_a_fresh_start_work_but_do_not_count(sim):
    x = torch.ones(100, device=sim.device)
    sim(budget=1000)
    assert sim.allocated_bytes == 0
    y = x + 1
    del x
    assert sim.allocated_bytes == 400
    assert y.sum().item() == 200


def test_memory_is_told_with_the_names_of_torch_cuda(sim):
    assert sim.module.mem_get_info() == (1 << 40, 1 << 40)  # without a budget
    sim(budget=1000)
    module, x = sim.module, torch.zeros(100, device=sim.device)
    stats = module.memory_stats()
    assert stats.keys() >= CUDA_FIGURES | {"num_ooms", "num_alloc_retries", "num_device_alloc"}
    assert stats["allocated_bytes.all.current"] == x.nbytes
    assert stats["allocation.all.allocated"] == 1
    assert module.memory_allocated(0) == module.memory_reserved("sim") == 400
    assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == 400
    assert module.mem_get_info() == torch.accelerator.get_memory_info() == (600, 1000)
    assert torch.accelerator.memory_stats() == dict(sorted(module.memory_stats().items()))
    del x
    assert module.memory_stats()["allocated_bytes.all.freed"] == 400
    assert module.max_memory_allocated(sim.device) == torch.accelerator.max_memory_reserved() == 400
    module.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert module.max_memory_allocated() == module.memory_stats()["allocation.all.allocated"] == 0
