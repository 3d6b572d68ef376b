"""The policy of sizes: what is tried after a failure, and when a larger size is."""

import logging
import math
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure import NewDisposeScope, adaptive
from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, add_listener, remove_listener
from tenure.adaptive._attempt._attempts import Attempts
from tenure.adaptive._sizes._limits import SizeLimits
from tenure.adaptive._sizes._record import SizeRecord
from tenure.adaptive._sizes._remembered import RememberedCall
from tenure.adaptive._sizes._search import AdaptiveSearch

from .size_simulation import Device, Memory, Site, Wall, oom


@pytest.fixture
def devices(monkeypatch):
    """Devices by name, whose memory can be measured."""
    found = {}
    monkeypatch.setattr("tenure.adaptive._sizes._search.meter_for", found.get)
    return found


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)
    yield
    logging.getLogger("tenure.adaptive").setLevel(logging.NOTSET)


NO_LIMITS = SizeLimits()


def search(initial, record=None, limits=NO_LIMITS, **options):
    memory = Memory()
    memory.record = record
    return AdaptiveSearch(initial, limits, memory, **options)


# --- smaller


@pytest.mark.parametrize(
    ("largest", "initial", "tried"),
    [
        (16, 64, [64, 32, 16]),
        (60, 100, [100, 50]),
        (1, 100, [100, 50, 25, 12, 6, 3, 1]),
        (100, 100, [100]),
    ],
)
def test_where_nothing_is_known_a_failed_size_is_halved(largest, initial, tried):
    site = Site(Wall(largest), initial)
    assert site.call() == tried[-1]
    assert site.sizes == tried


@given(initial=st.integers(1, 10**9), largest=st.integers(0, 10**9), align=st.integers(1, 100))
def test_every_size_is_smaller_than_the_failed_one_and_allowed(initial, largest, align):
    site = Site(Wall(largest), initial, SizeLimits(align=align))
    found = site.call()  # the simulation asserts it at each step
    assert found is None or found <= largest
    assert len(site.sizes) <= math.log2(initial) + 2


def test_the_minimum_is_the_last_size_that_is_tried():
    site = Site(Wall(5), 64, SizeLimits(minimum=12))
    assert site.call() is None
    assert site.sizes == [64, 32, 16, 12]


def test_after_all_sizes_failed_the_smallest_is_tried_next_and_never_zero():
    wall = Wall(0)
    site = Site(wall, 8)
    assert site.call() is None
    wall.largest = 100
    site.sizes.clear()
    assert [site.call() for _ in range(5)] == [1, 2, 4, 8, 8]


def test_the_bytes_that_were_wanted_make_the_step_down_as_large_as_it_has_to_be(devices):
    devices["fake:0"] = device = Device(free_bytes=100, piece_bytes=10)
    site = Site(device, 1000)
    assert site.call() == 10
    assert site.sizes == [1000, 10]


def test_the_same_size_that_fails_again_tells_nothing_new(devices):
    devices["fake:0"] = Device(free_bytes=100, piece_bytes=10)
    sizes = search(1000)
    assert sizes.shrink(oom("fake:0", 10_000))
    sizes.size = 1000  # as where memory came free in vain
    assert sizes.shrink(oom("fake:0", 10_000))
    assert sizes.size == 10


@pytest.mark.parametrize("kind", ["workspace", "driver", "size_limit"])
def test_bytes_that_were_not_wanted_of_this_memory_are_no_measure(devices, kind):
    devices["fake:0"] = Device(free_bytes=100, piece_bytes=10)
    sizes = search(1000)
    assert sizes.shrink(oom("fake:0", 10**9, kind))
    assert sizes.size == 500


@pytest.mark.parametrize(
    ("wanted", "then"), [(90, 90), (100, 99), (1000, 99), (0, 8), (-5, 8), (8, 8)]
)
def test_what_a_user_makes_of_a_failed_size_is_moved_into_what_is_allowed(wanted, then):
    seen = []

    def reduce(size, info):
        seen.append((size, info.kind))
        return wanted

    sizes = search(100, limits=SizeLimits(minimum=8), reduce=reduce)
    assert sizes.shrink(oom())
    assert sizes.size == then
    assert seen == [(100, "device")]


@given(st.lists(st.integers(-200, 200), min_size=1), st.integers(1, 100))
def test_a_reducer_that_stalls_still_comes_to_an_end(answers, minimum):
    turns = iter(range(10**6))
    sizes = search(
        100,
        limits=SizeLimits(minimum=minimum),
        reduce=lambda size, info: answers[next(turns) % len(answers)],
    )
    tried = [sizes.size]
    while sizes.shrink(oom()):
        tried.append(sizes.size)
    assert tried == sorted(set(tried), reverse=True)
    assert tried[-1] >= minimum


def test_a_reducer_that_returns_no_size_is_named():
    sizes = search(100, reduce=lambda size, info: size * 0.9)
    with pytest.raises(
        AdaptiveUsageError, match=r"^reduce= returned 90\.0, which is not a size\. "
    ):
        sizes.shrink(oom())


# --- remembered


def test_the_next_call_begins_with_what_worked():
    site = Site(Wall(16), 64)
    assert [site.call() for _ in range(3)] == [16, 16, 16]
    assert site.sizes == [64, 32, 16, 16, 16]


def test_a_later_smaller_initial_size_is_honoured_and_a_larger_one_does_not_forget():
    site = Site(Wall(32), 64)
    site.call()
    for initial, size in ((8, 8), (20, 20), (64, 32), (1000, 32)):
        site.initial = initial
        assert site.call() == size
    assert site.device.n_ooms == 1


def test_a_failure_of_what_worked_forgets_it():
    site = Site(Wall(60), 64)
    site.call()
    site.device.largest = 10
    site.sizes.clear()
    assert site.call() == 8
    assert site.sizes == [32, 16, 8]


def test_a_call_that_remembers_nothing_keeps_no_record():
    memory = RememberedCall(None, sys._getframe(), None, adaptive.NoBatchsizeCache, (), {})
    sizes = AdaptiveSearch(64, SizeLimits(), memory)
    assert sizes.shrink(oom())
    assert AdaptiveSearch(64, SizeLimits(), memory).size == 64


# --- larger


def test_sixteen_clean_calls_later_larger_sizes_are_tried_until_one_fails():
    site = Site(Wall(20), 64)
    found = [site.call() for _ in range(25)]
    assert found == [16] * 17 + [17, 18, 19, 20, 20, 20, 20, 20]
    assert site.sizes[:3] == [64, 32, 16]
    assert site.device.n_ooms == 3  # 64, 32 and at last 21


def test_memory_that_comes_free_is_found():
    site = Site(Wall(16), 64)
    site.call()
    site.device.largest = 1000
    found = [site.call() for _ in range(40)]
    assert found[:16] == [16] * 16
    assert found[-1] == 64
    assert site.device.n_ooms == 2


def test_a_maximum_lets_the_size_grow_beyond_the_initial_one():
    site = Site(Wall(1000), 32, SizeLimits(maximum=200))
    found = [site.call() for _ in range(30)]
    assert found[:16] == [32] * 16
    assert found[16:19] == [64, 128, 200]
    assert found[-1] == 200
    assert site.device.n_ooms == 0


def test_an_aligned_size_grows_by_whole_steps():
    site = Site(Wall(100), 256, SizeLimits(align=8))
    for _ in range(60):
        site.call()
    assert site.memory.record.ok == 96
    assert all(size % 8 == 0 for size in site.sizes)


@pytest.mark.parametrize(
    ("initial", "ok", "then"), [(64, 13, 8), (64, 5, 8), (5, 3, 5), (64, 40, 40)]
)
def test_a_size_that_another_call_found_is_aligned_and_never_too_small(initial, ok, then):
    assert search(initial, SizeRecord(ok, 50), SizeLimits(align=8)).size == then


def test_a_short_piece_that_failed_is_no_size_to_grow_to():
    record = SizeRecord(16, 21, n_clean=16)
    assert search(64, record, SizeLimits(align=8)).size == 24


def test_a_loop_grows_from_an_unaligned_size_by_whole_steps():
    site = Site(Wall(200), 64, SizeLimits(maximum=128, align=8), in_pieces=True)
    site.memory.record = SizeRecord(21, 22)
    site.call(2000)
    assert site.memory.record.ok == 128
    assert all(size % 8 == 0 for size in site.sizes)


@settings(deadline=None, max_examples=30)
@given(initial=st.integers(2, 10**4), share=st.floats(0.0, 1.0), n_calls=st.integers(1, 600))
def test_failures_grow_with_the_logarithm_of_the_calls(initial, share, n_calls):
    largest = max(1, int(initial * share))
    site = Site(Wall(largest), initial)
    for _ in range(n_calls):
        assert site.call() <= largest
    n_first = math.ceil(math.log2(initial / largest)) if largest < initial else 0
    assert site.device.n_ooms <= n_first + 2 + math.log2(max(1, n_calls / 16))


@settings(deadline=None, max_examples=100)
@given(largest=st.integers(1, 10**5), ratio=st.floats(1.0, 4.0))
def test_without_any_numbers_95_percent_are_found_with_three_failures_from_four_times_as_much(
    largest, ratio
):
    site = Site(Wall(largest), int(largest * ratio))
    found = [site.call() for _ in range(120)]
    assert site.device.n_ooms <= 3
    assert found[-1] >= 0.95 * largest


@st.composite
def loads(draw, most=60.0, most_fixed=0.3, powers=(1.0, 1.0)):
    """A device, and an initial size of up to so many times what fits."""
    free_bytes = draw(st.integers(10**6, 10**9))
    fixed_bytes = int(free_bytes * draw(st.floats(0, most_fixed)))
    power = draw(st.floats(*powers))
    largest, n_layers = draw(st.integers(20, 10**5)), draw(st.integers(1, 20))
    largest += draw(st.floats(0.1, 0.9))  # what is left over is too little for one more
    device = Device(
        free_bytes,
        piece_bytes=(free_bytes - fixed_bytes) / n_layers / largest**power,
        fixed_bytes=fixed_bytes,
        n_layers=n_layers,
        power=power,
    )
    return device, max(1, int(device.largest * draw(st.floats(1.0, most))))


@contextmanager
def measuring(device):
    """Let the memory of every device that has a name be measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tenure.adaptive._sizes._search.meter_for", lambda name: device if name else None
        )
        yield


@settings(deadline=None, max_examples=100)
@given(loads())
def test_with_measured_memory_95_percent_are_found_with_three_failures_in_few_pieces(load):
    device, initial = load
    with measuring(device):
        site = Site(device, initial, in_pieces=True)
        for _ in range(40):
            site.call(n_pieces=8)
    assert device.n_ooms <= 3
    assert site.memory.record is None or site.memory.record.ok >= 0.95 * device.largest


@settings(deadline=None, max_examples=100)
@given(loads(most=8.0))
def test_with_measured_memory_95_percent_are_found_with_three_failures_in_few_calls(load):
    device, initial = load
    with measuring(device):
        site = Site(device, initial)
        found = [site.call() for _ in range(20)]
    assert device.n_ooms <= 3
    assert found[0] >= 0.5 * min(initial, device.largest) - 1
    assert found[-1] >= 0.95 * min(initial, device.largest)


@settings(deadline=None, max_examples=100)
@given(loads())
def test_the_first_call_of_one_piece_comes_to_no_less_than_a_quarter(load):
    device, initial = load
    with measuring(device):
        found = Site(device, initial).call()
    assert device.n_ooms <= 5
    assert found >= 0.25 * min(initial, device.largest) - 1


@settings(deadline=None, max_examples=100)
@given(st.data())
@pytest.mark.parametrize(("most", "most_failures", "least"), [(16.0, 2, 0.95), (60.0, 3, 0.92)])
@pytest.mark.parametrize("way", [Site.call, Site.step], ids=["pieces", "trials"])
def test_the_first_call_comes_to_the_largest_size_where_it_can_go_on(
    way, most, most_failures, least, data
):
    device, initial = data.draw(loads(most))
    with measuring(device):
        site = Site(device, initial, in_pieces=True)
        found = way(site, 12)
    assert device.n_ooms <= most_failures
    assert found >= least * min(initial, device.largest) - 1


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(loads(powers=(1.0, 2.0), most=8.0), st.randoms(use_true_random=False))
@pytest.mark.parametrize("way", [Site.call, Site.step], ids=["pieces", "trials"])
def test_memory_that_is_steeper_or_varies_costs_one_failure_more_at_the_most(way, load, draw):
    device, initial = load
    device.vary = lambda: draw.uniform(-0.01, 0.01)
    with measuring(device):
        site = Site(device, initial, in_pieces=True)
        for _ in range(10):
            found = way(site, 12)
    assert device.n_ooms <= 4
    assert found >= 0.85 * min(initial, device.largest) - 1


def test_measured_memory_is_used_for_the_very_next_piece(devices):
    devices["fake:0"] = device = Device(free_bytes=10_000, piece_bytes=10)
    site = Site(device, 1024, in_pieces=True)
    assert site.call(n_pieces=3) == 980
    assert site.sizes == [1024, 256, 980, 980]


def test_measured_memory_is_used_for_the_very_next_call(devices):
    devices["fake:0"] = device = Device(free_bytes=10_000, piece_bytes=10)
    site = Site(device, 1024)
    assert [site.call(), site.call(), site.call()] == [512, 980, 980]
    assert device.n_ooms == 1


def test_measured_memory_that_comes_free_is_used_at_once(devices):
    devices["fake:0"] = device = Device(free_bytes=10_000, piece_bytes=10)
    site = Site(device, 1 << 20)
    for _ in range(5):
        site.call()
    device.free_bytes *= 3
    found = [site.call() for _ in range(4)]
    assert found[-1] >= 0.95 * device.largest


@pytest.mark.parametrize("way", [Site.call, Site.step], ids=["pieces", "trials"])
def test_memory_that_breathes_does_not_bring_back_what_failed_far_above(devices, way):
    devices["fake:0"] = device = Device(free_bytes=10_000, piece_bytes=10)
    site = Site(device, 16_000, in_pieces=True)
    for share in (1, 0.9, 0.8, 1, 0.85, 0.95, 0.8, 1) * 3:
        device.free_bytes = int(10_000 * share)
        way(site, 8)
    assert site.sizes.count(16_000) == 1
    assert site.sizes[-1] >= 0.95 * device.largest


class CutUp(Device):
    """A device of which measuring does not see what fragments take."""

    def run(self, size):
        self.peak_bytes = int(size * self.piece_bytes)
        if 1.3 * self.peak_bytes <= self.free_bytes:
            return None
        self.n_ooms += 1
        return oom("fake:0", self.peak_bytes)


def test_three_sizes_that_were_to_fit_and_failed_are_enough_until_more_is_free(devices):
    devices["fake:0"] = device = CutUp(free_bytes=100_000, piece_bytes=10)
    site = Site(device, 40_000)
    found = [site.call() for _ in range(12)]
    assert found[-8:] == [7499] * 8  # of 7692
    assert device.n_ooms == 5  # two of them before the first had worked
    device.free_bytes = 150_000
    assert site.call() > 9_000


def test_a_size_that_works_as_it_is_stays_when_a_larger_one_has_failed(devices):
    devices["fake:0"] = device = CutUp(free_bytes=100_000, piece_bytes=10)
    site = Site(device, 40_000)
    assert [site.call(), site.call(), site.call()] == [5000, 7499, 7499]


def test_a_rise_of_memory_that_can_not_be_measured_is_tried_without_waiting(devices):
    class Host(Device):
        measures = False

        def needed_bytes(self):
            return None

    devices["fake:0"] = device = Host(free_bytes=1 << 30, piece_bytes=1 << 24)
    site = Site(device, 128)
    assert [site.call(), site.call()] == [64, 64]
    device.free_bytes = (1 << 30) + (1 << 27)
    assert site.call() == 64  # too little to count
    device.free_bytes = 3 << 29
    assert [site.call() for _ in range(3)] == [67, 70, 73]
    assert device.n_ooms == 1


def test_a_long_loop_counts_its_pieces_like_calls():
    site = Site(Wall(20), 64, in_pieces=True)
    site.call(n_pieces=64 * 16 + 8)
    assert site.memory.record.ok == 20
    assert site.device.n_ooms == 3


def test_a_short_last_piece_teaches_nothing_about_larger_ones():
    site = Site(Wall(1000), 64, SizeLimits(maximum=500), in_pieces=True)
    search_ = AdaptiveSearch(64, site.limits, site.memory, in_pieces=True)
    search_.succeeded()
    search_.at_most(3)
    search_.succeeded()
    assert site.memory.record.ok == 64


def test_a_size_that_is_known_to_work_comes_before_a_reducer():
    sizes = search(64, SizeRecord(ok=16, bad=64, climbing=True), reduce=lambda size, info: 1)
    assert sizes.size == 17
    assert sizes.shrink(oom())
    assert sizes.size == 16


def attempted(sizes, largest, **options):
    """What a retry makes of work of which no more than so much fits."""

    def work(size):
        if size > largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return size

    with NewDisposeScope("test") as scope:
        return Attempts("f", scope, unit="size").run(sizes, work, **options)


def test_each_growth_is_told_once():
    events = []
    record = SizeRecord()
    add_listener(events.append)
    try:
        for _ in range(30):
            sizes = search(64, record)
            attempted(sizes, 18)
            sizes.finished()
    finally:
        remove_listener(events.append)
    growths = [event for event in events if event.kind == "grow"]
    assert [(event.size, event.next_size) for event in growths] == [(16, 17), (17, 18)]
    assert [event.kind for event in events] == ["shrink", "shrink", "grow", "grow", "shrink"]
    assert str(growths[0]) == "'f' goes on with size 17, after 16."


def test_work_that_ran_elsewhere_teaches_nothing():
    record = SizeRecord()
    sizes = search(4, record, SizeLimits(minimum=4))
    assert attempted(sizes, 0, fallback=lambda: ("elsewhere", sizes.size)) == ("elsewhere", 4)
    assert (record.ok, record.bad) == (0, 4)


def test_work_that_failed_elsewhere_teaches_nothing():
    record = SizeRecord()
    sizes = search(64, record, SizeLimits(minimum=32))
    assert attempted(sizes, 32) == 32
    assert (record.ok, record.bad) == (32, 64)

    def failing():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(OutOfRetriesError) as raised:
        attempted(sizes, 0, fallback=failing)
    assert raised.value.sizes == (32, 32)
    assert (record.ok, record.bad, sizes.size) == (0, None, 32)
