"""Exact accounting: what is allocated, the most that was, and when an allocation must fail."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenure.testing import Rates

pytestmark = pytest.mark.sim_allocator("exact")
ON_SIM = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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


def test_a_full_pool_waits_for_recorded_streams_before_it_fails(sim):
    sim(budget=100, rates=Rates(memory_bytes_per_s=1e3))
    x, side = taken(sim, 80), sim.module.Stream()
    with sim.module.stream(side):
        sim.launch_kernel(1.0, writes=[x])
    x.record_stream(side)
    del x
    waits = sim.host_waits
    assert taken(sim, 90).nbytes == 90
    assert sim.host_waits == waits + 1
    assert sim.module.memory_stats()["num_alloc_retries"] == 1
    assert sim.n_ooms == 0
