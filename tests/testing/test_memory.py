import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenure.testing._allocator._memory import ExactPool

pytestmark = pytest.mark.simdevice

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60)


def make_pool(budget_bytes=None, round_to_bytes=1, wait_host=lambda until_s: None):
    return ExactPool(budget_bytes, round_to_bytes, wait_host)


@given(steps=steps, budget_bytes=st.none() | st.integers(0, 20_000), unit=st.sampled_from([1, 512]))
def test_accounting_after_any_allocations_and_frees_equals_a_plain_sum(steps, budget_bytes, unit):
    pool = make_pool(budget_bytes, unit)
    live, peak_bytes, failures = [], 0, 0
    for is_free, number in steps:
        if is_free and live:
            pool.free(live.pop(number % len(live))[1])
            continue
        needed_bytes = -(-number // unit) * unit
        fits = budget_bytes is None or used(live, unit) + needed_bytes <= budget_bytes
        try:
            taken = pool.allocate(number, 0.0)
        except torch.OutOfMemoryError:
            failures += 1
            assert number > 0
            assert not fits
        else:
            assert fits or number == 0
            live.append((number, taken))
        peak_bytes = max(peak_bytes, used(live, unit))
    assert pool.allocated_bytes == pool.active_bytes == used(live, unit)
    assert pool.counters["requested_bytes"].current == sum(number for number, _ in live)
    assert pool.peak_bytes == peak_bytes
    assert pool.n_ooms == failures


def used(live, unit):
    return sum(-(-n_bytes // unit) * unit for n_bytes, _ in live)


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20), data=st.data())
def test_the_chosen_allocation_fails_and_no_other(sizes, data):
    number = data.draw(st.integers(1, len(sizes)))
    pool = make_pool()
    pool.fail_at(number)
    failed = []
    for index, n_bytes in enumerate(sizes, start=1):
        try:
            pool.allocate(n_bytes, 0.0)
        except torch.OutOfMemoryError:
            failed.append(index)
    assert failed == [number]
    assert not pool.failure_is_planted
    assert pool.n_allocations == len(sizes) - 1


def test_the_error_names_the_device_and_every_size_exactly():
    pool = make_pool(budget_bytes=4096)
    pool.allocate(3000, 0.0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pool.allocate(2000, 0.0)
    assert str(caught.value) == (
        "sim:0 out of memory. Tried to allocate 1.95 KiB (2000 bytes). sim:0 has a budget of"
        " 4.00 KiB (4096 bytes) of which 1.07 KiB (1096 bytes) is free; 2.93 KiB (3000 bytes) is"
        " allocated by PyTorch, and 0 bytes waits for other streams."
    )


def test_a_planted_failure_says_so_and_needs_no_budget():
    pool = make_pool()
    pool.fail_at(1)
    match = r"has no budget; .* This failure was planted with fail_at\(\)\."
    with pytest.raises(torch.OutOfMemoryError, match=match):
        pool.allocate(8, 0.0)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_failures_are_counted_from_one(number):
    with pytest.raises(ValueError, match=f"fail_at={number!r}: allocations are counted from 1"):
        make_pool().fail_at(number)


def test_an_empty_allocation_is_not_one():
    pool = make_pool(budget_bytes=0)
    pool.fail_at(1)
    pool.free(pool.allocate(0, 0.0))
    assert pool.n_allocations == 0
    assert pool.failure_is_planted


def test_bytes_that_wait_for_a_stream_are_active_but_not_allocated():
    pool = make_pool()
    pool.free(pool.allocate(100, 0.0), busy_until_s=2.0)
    assert (pool.allocated_bytes, pool.active_bytes) == (0, 100)
    pool.release_finished(1.9)
    assert pool.active_bytes == 100
    pool.release_finished(2.0)
    assert pool.active_bytes == 0


def test_a_full_pool_waits_for_recorded_streams_before_it_fails():
    waits = []
    pool = make_pool(budget_bytes=100, wait_host=waits.append)
    pool.free(pool.allocate(80, 0.0), busy_until_s=2.0)
    pool.allocate(90, 0.5)
    assert waits == [2.0]
    assert pool.retry_count == 1
    assert pool.n_ooms == 0
    assert pool.active_bytes == 90


def test_resetting_the_peak_starts_it_from_what_is_allocated():
    pool = make_pool()
    taken = pool.allocate(100, 0.0)
    pool.allocate(50, 0.0)
    pool.free(taken)
    pool.reset_peaks()
    assert pool.peak_bytes == 50
    pool.reset_totals()
    assert pool.n_allocations == 0
