"""Which size is tried next: after a failure, after a success, and in the next call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, GlobalBatchsizeCache, OutOfRetriesError, step

from .loads import Limited, Load, loads

pytestmark = pytest.mark.usefixtures("quiet")
MANY = settings(deadline=None, max_examples=15)


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
        (1, 100, {}, [100, 50, 25, 12, 6, 3, 1]),
        (12, 64, {"minimum": 12}, [64, 32, 16, 12]),
        (30, 5, {"align": 8}, [5]),
        (60, 100, {"maximum": 64, "align": 8}, [64, 32]),
    ],
)
def test_where_nothing_is_known_a_failed_size_is_halved(largest, initial, options, tried):
    work = Limited(largest)
    assert batch_of(work, initial, **options)() == tried[-1]
    assert work.sizes == tried


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
            for value in (0, 1.5, True)
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
        ({"minimum": 8, "align": 8}, "8 with minimum= and align=,"),
        ({"minimum": 5, "align": 4}, "8 with minimum= or align=,"),
    ],
)
def test_what_allows_no_smaller_size_is_named(options, named):
    with pytest.raises(OutOfRetriesError, match=f"Allow less than {named}"):
        batch_of(Limited(1), 16, **options)()


# --- remembered


def test_a_later_smaller_initial_size_is_honoured_and_a_larger_one_does_not_forget():
    work = Limited(32)
    call = batch_of(work, 64, context="one")
    call()
    found = [call(toma_initial_batchsize=initial) for initial in (8, 20, 64, 1000)]
    assert found == [8, 20, 32, 32]
    assert work.sizes == [64, 32, *found]


@pytest.mark.parametrize(("ok", "then"), [(13, 8), (5, 8)])
def test_a_size_that_another_call_found_is_aligned_and_never_too_small(ok, then):
    work = Limited(ok)
    batch_of(work, 2 * ok, context="one")()
    work.sizes.clear()
    work.largest = 64
    batch_of(work, 64, context="one", align=8)()
    assert work.sizes == [then]


def test_a_call_that_ends_in_another_error_remembers_what_did_not_fit():
    work = Limited(16)

    def fails(size):
        work(size)
        raise ValueError("of the work")

    call = batch_of(fails, 64)
    for initial in (64, 64, 8):
        with pytest.raises(ValueError, match="of the work"):
            call(toma_initial_batchsize=initial)
    assert work.sizes == [64, 32, 16, 16, 8]


# --- larger, where nothing is measured


@pytest.mark.parametrize("grows", [False, True], ids=["one shape", "another each time"])
def test_sixteen_clean_calls_later_larger_sizes_are_tried_until_one_fails(grows):
    work = Limited(20)
    call = batch_of(work, 64, cache_type=GlobalBatchsizeCache)
    found = [call(torch.ones(2, n + 1 if grows else 1)) for n in range(60)]
    assert found == [16] * 17 + [17, 18, 19] + [20] * 40
    assert [size for size in work.sizes if size > 20] == [64, 32, 21]


def test_a_maximum_lets_the_size_grow_beyond_the_initial_one():
    call = batch_of(Limited(1000), 32, maximum=200, cache_type=GlobalBatchsizeCache)
    found = [call() for _ in range(30)]
    assert found[:19] == [32] * 16 + [64, 128, 200]
    assert found[-1] == 200


@pytest.mark.parametrize(
    ("largest", "later", "initial", "options", "found"),
    # a size that failed and runs now is no limit; an aligned one grows by whole steps
    [(20, 512, 64, {"maximum": 512}, 512), (100, 100, 256, {"align": 8}, 96)],
)
def test_sizes_grow_in_later_calls(largest, later, initial, options, found):
    work = Limited(largest)
    call = batch_of(work, initial, cache_type=GlobalBatchsizeCache, **options)
    call()
    work.largest = later
    assert [call() for _ in range(60)][-1] == found
    assert all(size % options.get("align", 1) == 0 for size in work.sizes)


@MANY
@given(largest=st.integers(1, 10**5), ratio=st.floats(1.0, 4.0))
def test_without_any_numbers_95_percent_are_found_with_three_failures_from_four_times_as_much(
    largest, ratio
):
    adaptive.reset()
    work = Limited(largest)
    call = batch_of(work, int(largest * ratio), cache_type=GlobalBatchsizeCache)
    found = [call() for _ in range(120)]
    assert sum(size > largest for size in work.sizes) <= 3
    assert found[-1] >= 0.95 * largest


def test_a_short_last_piece_teaches_nothing_about_larger_ones():
    work = Limited(1000)
    run = adaptive.range(initial_step=64, maximum=500)(lambda start, end: work(end - start))
    for _ in range(2):
        run(0, 64 + 3)
    assert work.sizes == [64, 3, 64, 3]


# --- by what was measured


@pytest.mark.parametrize(
    ("make", "tried"),
    [(batch_of, [1024, 512, 980, 980]), (pieces_of, [1024, 256, 980, 980])],
    ids=["calls", "pieces"],
)
def test_measured_memory_is_used_for_the_very_next_size(make, tried):
    load = Load(10_000, 10)
    load.own = 5000
    with load.budget():
        held = torch.empty(load.own, dtype=torch.uint8)
        call = make(load, 1024, cache_type=GlobalBatchsizeCache)
        for _ in range(3):
            call()
    assert load.sizes[:4] == tried
    del held


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
@given(loads(most_initial=16.0, most_fixed=0.9))
def test_the_first_step_comes_to_95_percent(given_load):
    adaptive.reset()
    load, initial = given_load
    with load.budget():
        found = step_of(load, initial)()
    assert len(set(load.failed)) <= 2
    assert found >= 0.95 * min(initial, load.largest) - 1


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


@pytest.mark.parametrize("make", [batch_of, pieces_of], ids=["calls", "pieces"])
@pytest.mark.parametrize("limit", [7000, 30_000])
def test_more_or_less_memory_than_in_the_last_call_is_used_without_a_failure(make, limit):
    load = Load(10_000, 10, fixed=2000)
    call = make(load, 1000, maximum=1 << 20, cache_type=GlobalBatchsizeCache)
    with load.budget():
        call()
    load.failed.clear()
    load.limit = limit
    with load.budget():
        found = [call() for _ in range(4)][-1]
    assert load.failed == []
    assert 0.95 * load.largest <= found <= load.largest


# --- told


def test_each_growth_is_told_once():
    events, work = [], Limited(18)
    call = batch_of(work, 64, cache_type=GlobalBatchsizeCache, on_retry=events.append)
    for _ in range(30):
        call()
    assert [event.kind for event in events] == ["shrink", "shrink", "grow", "grow", "shrink"]
    growths = [event for event in events if event.kind == "grow"]
    assert [(event.size, event.next_size) for event in growths] == [(16, 17), (17, 18)]
    assert str(growths[0]).endswith(" goes on with batch size 17, after 16.")


@pytest.mark.parametrize(("largest", "initial"), [(20, 200), (3, 24)])
def test_a_small_size_grows_though_most_of_its_memory_is_fixed(largest, initial):
    """One size does not show what is fixed: a smaller one does, or one more sample."""
    load = Load(10**6, 250_000 / (largest + 0.5), 750_000)
    assert load.largest == largest
    with load.budget():
        found = step_of(load, initial)()
    assert found >= 0.95 * largest - 1
    assert len(set(load.failed)) <= 3
