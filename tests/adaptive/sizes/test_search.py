"""Which size is tried next: after a failure, after a success, and in the next call."""

import contextlib
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure import adaptive
from tenure.adaptive import (
    AdaptiveUsageError,
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    OutOfRetriesError,
    memory_budget,
    step,
)

from .loads import Load, loads, walled

pytestmark = pytest.mark.usefixtures("forgetful", "quiet")
MANY = settings(deadline=None, max_examples=60)


def batch_of(work, initial, **options):
    """A call of the work, which remembers its size."""
    return adaptive.batch(initial_batchsize=initial, **options)(work)


def pieces_of(work, initial, **options):
    """A call that works on so many pieces, and returns the size of the last whole one."""
    sizes = []

    @adaptive.range(initial_step=initial, **options)
    def run(start, end):
        work(end - start)
        sizes.append(end - start)

    def call(n_pieces=12):
        end = 0
        for size in (initial, *[work.largest] * n_pieces):
            end += size
        run(0, end)
        return sizes[-2] if len(sizes) > 1 else sizes[-1]

    return call


def step_of(work, initial):
    """A step on so many samples."""
    weight = torch.ones(1, requires_grad=True)

    def loss(batch):
        held = work(len(batch))
        return weight.sum() * held

    def call():
        weight.grad = None
        return step(loss, torch.empty(initial, 0), loss="sum", verify=False).micro_batch

    return call


# --- smaller


@pytest.mark.parametrize(
    ("largest", "initial", "options", "tried"),
    [
        (16, 64, {}, [64, 32, 16]),
        (60, 100, {}, [100, 50]),
        (1, 100, {}, [100, 50, 25, 12, 6, 3, 1]),
        (100, 100, {}, [100]),
        (12, 64, {"minimum": 12}, [64, 32, 16, 12]),
        (30, 100, {"align": 8}, [96, 48, 24]),
        (30, 5, {"align": 8}, [5]),
        (60, 100, {"maximum": 64, "align": 8}, [64, 32]),
    ],
)
def test_where_nothing_is_known_a_failed_size_is_halved(largest, initial, options, tried):
    work = walled(largest)
    assert batch_of(work, initial, **options)() == tried[-1]
    assert work.sizes == tried


@MANY
@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(1, 100), st.integers(1, 10**6))
def test_every_size_is_smaller_than_the_failed_one_and_allowed(initial, largest, align, minimum):
    work, floor = walled(largest), -(-minimum // align) * align
    if initial < minimum or max(initial // align * align, initial % align) < minimum:
        return
    with contextlib.suppress(OutOfRetriesError):
        batch_of(work, initial, align=align, minimum=minimum, cache_type=NoBatchsizeCache)()
    assert work.sizes == sorted(set(work.sizes), reverse=True)
    assert all(size % align == 0 and size >= floor for size in work.sizes[1:])
    assert len(work.sizes) <= math.log2(initial) + 2


def test_the_bytes_that_were_wanted_make_the_step_down_as_large_as_it_has_to_be():
    load = Load(100, 10)
    with load.budget():
        assert batch_of(load, 1000)() == 10
    assert load.sizes == [1000, 10]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"minimum": 9, "maximum": 10, "align": 8}, r"^maximum=10 leaves no size: the smallest "),
        ({"initial_batchsize": 4, "minimum": 8}, r"^initial_batchsize=4 is below minimum=8\. Ra"),
        (
            {"initial_batchsize": 12, "minimum": 10, "align": 8},
            r"^initial_batchsize=12 leaves no size: the smallest allowed is 16, by minimum=10 and ",
        ),
        *(
            ({"align": value}, rf"^align={value!r} is not a size\. Give a whole number from 1 up")
            for value in (0, -1, 1.5, "8", True, None)
        ),
    ],
)
def test_limits_that_leave_no_size_are_refused(options, told):
    with pytest.raises(AdaptiveUsageError, match=told):
        adaptive.batch(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"minimum": 8}, "8 with minimum=,"),
        ({"align": 8}, "8 with align=,"),
        ({"minimum": 8, "align": 8}, "8 with minimum= and align=,"),
        ({"minimum": 16, "align": 8}, "16 with minimum=,"),
        ({"minimum": 5, "align": 4}, "8 with minimum= or align=,"),
    ],
)
def test_what_allows_no_smaller_size_is_named(options, named):
    with pytest.raises(OutOfRetriesError, match=f"Allow less than {named}"):
        batch_of(walled(1), 16, **options)()


# --- remembered


def test_the_next_call_begins_with_what_worked():
    work = walled(16)
    call = batch_of(work, 64, cache_type=GlobalBatchsizeCache)
    assert [call() for _ in range(3)] == [16, 16, 16]
    assert work.sizes == [64, 32, 16, 16, 16]
    work.largest = 10
    assert call() == 8


def test_a_later_smaller_initial_size_is_honoured_and_a_larger_one_does_not_forget():
    work = walled(32)
    call = batch_of(work, 64, context="one")
    call()
    found = [call(toma_initial_batchsize=initial) for initial in (8, 20, 64, 1000)]
    assert found == [8, 20, 32, 32]
    assert work.sizes == [64, 32, *found]


@pytest.mark.parametrize(("initial", "ok", "then"), [(64, 13, 8), (64, 5, 8), (64, 40, 40)])
def test_a_size_that_another_call_found_is_aligned_and_never_too_small(initial, ok, then):
    work = walled(ok)
    batch_of(work, 2 * ok, context="one")()
    work.sizes.clear()
    work.largest = 64
    batch_of(work, initial, context="one", align=8)()
    assert work.sizes == [then]


# --- larger, where nothing is measured


def test_sixteen_clean_calls_later_larger_sizes_are_tried_until_one_fails():
    work = walled(20)
    call = batch_of(work, 64, cache_type=GlobalBatchsizeCache)
    assert [call() for _ in range(25)] == [16] * 17 + [17, 18, 19] + [20] * 5
    assert [size for size in work.sizes if size > 20] == [64, 32, 21]


def test_memory_that_comes_free_is_found():
    work = walled(16)
    call = batch_of(work, 64, cache_type=GlobalBatchsizeCache)
    call()
    work.largest = 1000
    found = [call() for _ in range(40)]
    assert found[:16] == [16] * 16
    assert found[-1] == 64
    assert [size for size in work.sizes if size > 16][:2] == [64, 32]


def test_a_maximum_lets_the_size_grow_beyond_the_initial_one():
    call = batch_of(walled(1000), 32, maximum=200, cache_type=GlobalBatchsizeCache)
    found = [call() for _ in range(30)]
    assert found[:19] == [32] * 16 + [64, 128, 200]
    assert found[-1] == 200


@pytest.mark.parametrize(("largest", "found"), [(100, 96), (50, 48)])
def test_an_aligned_size_grows_by_whole_steps(largest, found):
    work = walled(largest)
    call = batch_of(work, 256, align=8, cache_type=GlobalBatchsizeCache)
    assert [call() for _ in range(60)][-1] == found
    assert all(size % 8 == 0 for size in work.sizes)


@MANY
@given(initial=st.integers(2, 10**4), share=st.floats(0.0, 1.0), n_calls=st.integers(1, 300))
def test_failures_grow_with_the_logarithm_of_the_calls(initial, share, n_calls):
    adaptive.reset()
    largest = max(1, int(initial * share))
    work = walled(largest)
    call = batch_of(work, initial, cache_type=GlobalBatchsizeCache)
    assert all(call() <= largest for _ in range(n_calls))
    n_first = math.ceil(math.log2(initial / largest)) if largest < initial else 0
    n_failed = sum(size > largest for size in work.sizes)
    assert n_failed <= n_first + 2 + math.log2(max(1, n_calls / 16))


def test_each_failure_doubles_the_calls_before_the_next():
    work = walled(20)
    call = batch_of(work, 64, cache_type=GlobalBatchsizeCache)
    for _ in range(4000):
        call()
    failed = [i for i, size in enumerate(work.sizes) if size > 20]
    assert len(failed) == 6
    assert all(b - a >= 512 << i for i, (a, b) in enumerate(itertools.pairwise(failed[2:])))


@MANY
@given(largest=st.integers(1, 10**5), ratio=st.floats(1.0, 4.0))
def test_without_any_numbers_95_percent_are_found_with_three_failures_from_four_times_as_much(
    largest, ratio
):
    adaptive.reset()
    work = walled(largest)
    call = batch_of(work, int(largest * ratio), cache_type=GlobalBatchsizeCache)
    found = [call() for _ in range(120)]
    assert sum(size > largest for size in work.sizes) <= 3
    assert found[-1] >= 0.95 * largest


def test_a_long_loop_counts_its_pieces_like_calls():
    work = walled(20)
    pieces = pieces_of(work, 64)
    assert pieces(64 * 16 + 200) == 20
    assert [size for size in work.sizes if size > 20] == [64, 32, 21]


def test_a_short_last_piece_teaches_nothing_about_larger_ones():
    work = walled(1000)
    run = adaptive.range(initial_step=64, maximum=500)(lambda start, end: work(end - start))
    for _ in range(2):
        run(0, 64 + 3)
    assert work.sizes == [64, 3, 64, 3]


def test_a_rise_of_memory_that_can_not_be_measured_is_tried_without_waiting(monkeypatch):
    free = [1 << 30]
    monkeypatch.setattr("tenure.adaptive._memory._meter.free_host_bytes", lambda: free[0])
    work = walled(64)

    def of_host(size):
        if size > work.largest:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return size

    call = batch_of(of_host, 128, cache_type=GlobalBatchsizeCache)
    assert [call(), call()] == [64, 64]
    free[0], work.largest = (1 << 30) + (1 << 27), 96
    assert call() == 64  # too little to count
    free[0] = 3 << 29
    assert [call() for _ in range(3)] == [67, 70, 73]


# --- by what was measured


@pytest.mark.parametrize(
    ("make", "tried"),
    [(batch_of, [1024, 512, 980, 980]), (pieces_of, [1024, 256, 980, 980])],
    ids=["calls", "pieces"],
)
def test_measured_memory_is_used_for_the_very_next_size(make, tried):
    load = Load(10_000, 10)
    with load.budget():
        call = make(load, 1024, cache_type=GlobalBatchsizeCache)
        for _ in range(3):
            call()
    assert load.sizes[:4] == tried


def test_a_trial_of_an_eighth_and_one_that_shows_what_is_fixed_give_the_size_of_a_step():
    load = Load(10_050, 10, fixed=5000)
    call = step_of(load, 2000)
    with load.budget():
        assert call() == call() == 494
    # two micro-batches each, of which the first makes the gradients
    assert [*dict.fromkeys(load.sizes)][:4] == [2000, 250, 62, 494]


@MANY
@given(loads())
def test_with_measured_memory_95_percent_are_found_with_three_failures_in_few_pieces(given_load):
    adaptive.reset()
    load, initial = given_load
    with load.budget():
        call = pieces_of(load, initial)
        found = [call() for _ in range(6)][-1]
    assert len(load.failed) <= 3
    assert found >= 0.95 * load.largest - 1


@MANY
@given(loads(most_initial=8.0))
def test_with_measured_memory_95_percent_are_found_with_three_failures_in_few_calls(given_load):
    adaptive.reset()
    load, initial = given_load
    with load.budget():
        call = batch_of(load, initial, cache_type=GlobalBatchsizeCache)
        found = [call() for _ in range(20)]
    assert len(load.failed) <= 3
    assert found[0] >= 0.5 * min(initial, load.largest) - 1
    assert found[-1] >= 0.95 * min(initial, load.largest)


@MANY
@given(st.data())
@pytest.mark.parametrize(("most", "most_failures"), [(16.0, 2), (60.0, 3)])
@pytest.mark.parametrize("make", [pieces_of, step_of], ids=["pieces", "trials"])
def test_the_first_call_comes_to_95_percent_where_it_can_go_on(make, most, most_failures, data):
    adaptive.reset()
    most_fixed = 0.9 if make is step_of else 0.3
    load, initial = data.draw(loads(most, most_fixed))
    with load.budget():
        found = make(load, initial)()
    assert len(set(load.failed)) <= most_failures
    assert found >= 0.95 * min(initial, load.largest) - 1


@MANY
@given(
    loads(powers=(1.0, 2.0), most_initial=8.0, most_fixed=0.9), st.randoms(use_true_random=False)
)
def test_memory_that_is_steeper_and_varies_fails_three_times_at_the_most(given_load, draw):
    adaptive.reset()
    load, initial = given_load
    load.vary = lambda: draw.uniform(-0.005, 0.005)
    with load.budget():
        found = step_of(load, initial)()
    assert len(set(load.failed)) <= 3
    assert found >= 0.8 * min(initial, load.largest) - 1


@pytest.mark.parametrize(("initial", "maximum"), [(1 << 20, None), (1024, 1 << 20)])
def test_measured_memory_that_comes_free_is_used_at_once(initial, maximum):
    load = Load(10_000, 10)
    call = batch_of(load, initial, maximum=maximum, cache_type=GlobalBatchsizeCache)
    with load.budget():
        call()
    load.limit *= 3
    with load.budget():
        found = [call() for _ in range(4)]
    assert found[-1] >= 0.95 * load.largest


@pytest.mark.parametrize("make", [pieces_of, step_of], ids=["pieces", "trials"])
def test_memory_that_breathes_does_not_bring_back_what_failed_far_above(make):
    load = Load(10_000, 10)
    call = make(load, 16_000)
    for share in (1, 0.9, 0.8, 1, 0.85, 0.95, 0.8, 1) * 3:
        load.limit = int(10_000 * share)
        with load.budget():
            found = call()
    assert load.sizes.count(16_000) == 1
    assert found >= 0.95 * load.largest


@MANY
@given(loads(most_initial=8.0, cuts=(1.3,)))
def test_sizes_that_were_to_fit_and_failed_are_enough_until_more_is_free(given_load):
    adaptive.reset()
    load, initial = given_load
    call = batch_of(load, initial, cache_type=GlobalBatchsizeCache)
    with load.budget():
        found = [call() for _ in range(20)]
        n_failed = len(load.failed)
        # up to three before the first has worked, and three that were to fit
        assert n_failed <= 6
        assert found[-1] >= 0.95 * min(initial, load.largest)
        assert [call() for _ in range(20)] == [found[-1]] * 20
        assert len(load.failed) == n_failed


def test_after_failures_of_sizes_that_were_to_fit_larger_ones_are_tried_when_more_is_free():
    load = Load(10_000, 10, cut=1.3)
    call = batch_of(load, 1024, maximum=1 << 20, cache_type=GlobalBatchsizeCache)
    with load.budget():
        found = [call() for _ in range(12)]
    assert found[-5:] == [found[-1]] * 5
    load.limit = load.limit * 5 // 4
    assert found[-1] < 0.8 * load.largest
    with load.budget():
        found = [call() for _ in range(12)]
    assert found[-1] >= 0.95 * load.largest


@pytest.mark.parametrize(
    ("calls", "tried"),
    [
        # a smaller size that needed more says nothing of what grows
        ([(1024, 2400), (1024, 0), (1024, 0)], [1024, 512, 666, 980]),
        # a smaller size that needs less says that this one does, too
        ([(1024, 1500), (1024, 300), (100, 0), (1024, 0)], [1024, 512, 757, 100, 980]),
    ],
)
def test_memory_that_only_the_first_calls_needed_does_not_count_later(calls, tried):
    load = Load(10_000, 10)
    call = batch_of(load, 1024, cache_type=GlobalBatchsizeCache)
    with load.budget():
        for initial, first_only in calls:
            load.fixed = first_only
            call(toma_initial_batchsize=initial)
    assert load.sizes == tried


def test_a_smaller_piece_of_memory_makes_the_size_smaller_before_it_fails():
    load = Load(10_000, 10, fixed=2000)
    call = pieces_of(load, 1000)
    with load.budget():
        call()
    load.failed.clear()
    load.limit = 7000
    with load.budget():
        found = call()
    assert load.failed == []
    assert 0.95 * load.largest <= found <= load.largest


# --- told


def test_each_growth_is_told_once():
    events, work = [], walled(18)
    call = batch_of(work, 64, cache_type=GlobalBatchsizeCache, on_retry=events.append)
    for _ in range(30):
        call()
    assert [event.kind for event in events] == ["shrink", "shrink", "grow", "grow", "shrink"]
    growths = [event for event in events if event.kind == "grow"]
    assert [(event.size, event.next_size) for event in growths] == [(16, 17), (17, 18)]
    assert str(growths[0]).endswith(" goes on with batch size 17, after 16.")


def test_a_budget_of_another_call_does_not_shrink_what_fits_whole():
    with memory_budget("1MiB"):
        call = batch_of(Load(1 << 20, 1024), 64, cache_type=GlobalBatchsizeCache)
        assert [call() for _ in range(3)] == [64] * 3


@pytest.mark.parametrize(("largest", "initial"), [(20, 200), (20, 180), (7, 64), (3, 24)])
def test_a_small_size_grows_though_most_of_its_memory_is_fixed(largest, initial):
    """One size does not show what is fixed: a smaller one does, or one more sample."""
    load = Load(10**6, 250_000 / (largest + 0.5), 750_000)
    assert load.largest == largest
    with load.budget():
        found = step_of(load, initial)()
    assert found >= 0.95 * largest - 1
    assert len(set(load.failed)) <= 3
