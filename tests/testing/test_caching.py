"""The caching allocator by itself: its invariants, and sequences worked by hand from the source."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure._cuda_blocks import segment_bytes
from tenure.testing._allocator._caching import CachingPool

pytestmark = pytest.mark.simdevice

KIB = 1 << 10
MIB = 1 << 20
GROUPS = ("all", "small_pool", "large_pool")


class Device:
    """A pool, its time, and the waits that it asks for."""

    def __init__(self, budget_bytes=None):
        self.now_s = 0.0
        self.busy_until_s = 0.0
        self.waits = []
        self.pool = CachingPool(budget_bytes, self.wait, lambda: self.busy_until_s)

    def wait(self, until_s):
        self.waits.append(until_s)
        self.now_s = max(self.now_s, until_s)

    def take(self, n_bytes, stream_id=0):
        return self.pool.allocate(n_bytes, self.now_s, stream_id)

    def stats(self, *names):
        stats = self.pool.statistics(self.now_s)
        return [stats[name] for name in names]


sizes = st.one_of(
    st.integers(0, 5000),
    st.integers(MIB - 2000, MIB + 2000),
    st.integers(1, 12 * MIB),
    st.integers(10 * MIB - 1000, 40 * MIB),
)
acts = st.one_of(
    st.tuples(st.just("take"), sizes, st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(0, 1000), st.booleans()),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
    st.tuples(st.just("time"), st.integers(0, 3), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(acts=st.lists(acts, max_size=60), budget_mib=st.none() | st.integers(0, 120))
def test_after_anything_blocks_tile_their_segments_and_all_figures_agree(acts, budget_mib):
    device = Device(None if budget_mib is None else budget_mib * MIB)
    live = []
    for act, number, detail in acts:
        if act == "take":
            before = device.pool.statistics(0.0)
            try:
                block = device.take(number, detail)
            except torch.OutOfMemoryError:
                check_refusal(device.pool, before, number)
            else:
                live += [(block, number, detail)] if number else []
        elif act == "free" and live:
            block, _, _ = live.pop(number % len(live))
            device.pool.free(block, device.now_s + 2.0 if detail else None)
        elif act == "empty":
            device.pool.empty_cache(device.now_s)
        else:
            device.now_s += number
        check(device.pool, live)


def check_refusal(pool, before, number):
    after = pool.statistics(0.0)
    for name in ("allocation", "allocated_bytes"):
        assert after[f"{name}.all.current"] == before[f"{name}.all.current"]
    assert pool.budget_bytes is not None
    n_bytes = -(-number // 512) * 512
    assert after["reserved_bytes.all.current"] + segment_bytes(n_bytes) > pool.budget_bytes


def check(pool, live):
    """Every rule that a state of the allocator keeps, read from what it tells of itself."""
    segments = pool.snapshot()
    blocks = [(segment, block) for segment in segments for block in segment["blocks"]]
    for segment in segments:
        check_segment(segment)
    taken = {block.address: (number, stream) for block, number, stream in live}
    told = [(s, b) for s, b in blocks if b["state"] == "active_allocated"]
    assert {b["address"]: (b["requested_size"], s["stream"]) for s, b in told} == taken
    for group in GROUPS:
        kind = {"small_pool": "small", "large_pool": "large"}.get(group)
        check_figures(
            pool.statistics(0.0),
            group,
            [s for s in segments if kind in (None, s["segment_type"])],
        )
    assert pool.budget_bytes is None or pool.reserved_bytes <= pool.budget_bytes


def check_segment(segment):
    address = segment["address"]
    states = []
    for block in segment["blocks"]:
        assert block["address"] == address
        assert block["size"] % 512 == 0 < block["size"]
        address += block["size"]
        states.append(block["state"])
    assert address == segment["address"] + segment["total_size"]
    assert ("inactive", "inactive") not in pairwise(states)
    step = 2 * MIB
    assert segment["total_size"] == step or segment["total_size"] % step == 0
    assert (segment["segment_type"] == "small") <= (segment["total_size"] == step)


def check_figures(stats, group, segments):
    blocks = [(segment, block) for segment in segments for block in segment["blocks"]]
    allocated = [b for _, b in blocks if b["state"] == "active_allocated"]
    active = [b for _, b in blocks if b["state"] != "inactive"]
    split = [b for s, b in blocks if b["state"] == "inactive" and len(s["blocks"]) > 1]
    figures = {
        "segment": len(segments),
        "reserved_bytes": sum(segment["total_size"] for segment in segments),
        "allocation": len(allocated),
        "allocated_bytes": sum(block["size"] for block in allocated),
        "active": len(active),
        "active_bytes": sum(block["size"] for block in active),
        "requested_bytes": sum(block["requested_size"] for block in active),
        "inactive_split": len(split),
        "inactive_split_bytes": sum(block["size"] for block in split),
    }
    for name, figure in figures.items():
        assert stats[f"{name}.{group}.current"] == figure, name
        totals = [stats[f"{name}.{group}.{part}"] for part in ("peak", "allocated", "freed")]
        assert totals[0] >= figure == totals[1] - totals[2]


def test_small_requests_share_a_segment_of_2_mib_in_steps_of_512_bytes():
    device = Device()
    first, second = device.take(1), device.take(513)
    assert (first.n_bytes, second.n_bytes) == (512, 1024)
    assert second.address == first.address + 512
    assert device.pool.reserved_bytes == 2 * MIB
    assert device.stats("inactive_split_bytes.small_pool.current") == [2 * MIB - 1536]
    device.take(MIB)
    device.take(MIB)  # 1 MiB less 1.5 KiB is left of the first segment
    assert device.stats("segment.small_pool.current", "segment.large_pool.current") == [2, 0]


@pytest.mark.parametrize(
    ("n_bytes", "reserved_bytes"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_what_a_first_request_reserves(n_bytes, reserved_bytes):
    device = Device()
    device.take(n_bytes)
    assert device.pool.reserved_bytes == reserved_bytes


def test_a_large_block_keeps_up_to_1_mib_that_nobody_asked_for():
    device = Device()
    block = device.take(25 * MIB)
    assert block.n_bytes == device.pool.allocated_bytes == 26 * MIB
    assert device.stats("requested_bytes.all.current") == [25 * MIB]
    device.pool.free(block)
    assert device.take(25 * MIB - 512).n_bytes == 25 * MIB - 512
    assert device.pool.reserved_bytes == 26 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    device = Device()
    blocks = [device.take(n * MIB) for n in (30, 12, 20)]
    for block in blocks:
        device.pool.free(block)
    assert device.take(11 * MIB).address == blocks[1].address
    assert device.take(13 * MIB).address == blocks[2].address
    assert device.take(7 * MIB).address == blocks[2].address + 13 * MIB
    assert device.pool.reserved_bytes == 62 * MIB


def test_freed_neighbours_become_one_block_in_any_order():
    device = Device()
    blocks = [device.take(4 * MIB) for _ in range(5)]
    for index in (1, 3, 2, 0, 4):
        device.pool.free(blocks[index])
    assert device.stats("inactive_split.all.current", "segment.all.current") == [0, 1]
    assert device.take(20 * MIB).address == blocks[0].address
    assert device.pool.reserved_bytes == 20 * MIB


def test_a_block_that_a_recorded_stream_uses_is_neither_taken_nor_merged_until_it_is_done():
    device = Device()
    first, second = device.take(4 * MIB), device.take(4 * MIB)
    device.pool.free(first, busy_until_s=2.0)
    device.pool.free(second)
    assert (device.pool.allocated_bytes, device.pool.active_bytes) == (0, 4 * MIB)
    states = [block["state"] for block in device.pool.snapshot()[0]["blocks"]]
    assert states == ["active_pending_free", "inactive"]
    device.now_s = 1.9
    assert device.take(4 * MIB).address == second.address
    device.now_s = 2.0  # time alone changes nothing: the next allocation looks
    assert device.pool.active_bytes == 8 * MIB
    assert device.take(4 * MIB).address == first.address
    assert device.waits == []


def test_a_full_device_gives_back_whole_segments_waits_for_its_work_and_tries_again():
    device = Device(budget_bytes=44 * MIB)
    kept, unused = device.take(4 * MIB), device.take(24 * MIB)
    device.pool.free(unused, busy_until_s=3.0)
    device.busy_until_s = 5.0
    device.take(22 * MIB)  # the 16 MiB beside what is kept serve nobody
    assert device.waits == [3.0, 5.0]
    assert device.stats("num_alloc_retries", "num_ooms", "num_device_free") == [1, 0, 1]
    assert device.pool.reserved_bytes == 42 * MIB
    device.pool.free(kept)
    device.pool.empty_cache(device.now_s)
    assert device.pool.reserved_bytes == 22 * MIB


def test_empty_cache_keeps_segments_of_which_any_block_is_in_use():
    device = Device()
    kept, gone = device.take(4 * MIB), device.take(4 * MIB)
    other = device.take(30 * MIB)
    device.pool.free(gone)
    device.pool.free(other)
    device.pool.empty_cache(0.0)
    assert device.pool.reserved_bytes == 20 * MIB
    device.pool.free(kept)
    device.pool.empty_cache(0.0)
    assert device.pool.reserved_bytes == 0
    assert device.pool.snapshot() == []


def test_a_fraction_is_looked_at_where_a_segment_is_taken_and_nowhere_else():
    device = Device(budget_bytes=100 * MIB)
    block = device.take(4 * MIB)
    device.pool.fraction = 0.05
    device.take(15 * MIB)
    device.pool.free(block)
    device.take(4 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"5\.00 MiB allowed; "):
        device.take(512)
    device.pool.fraction = 0.22
    device.take(512)
    assert device.pool.fraction == 0.22


def test_a_lowered_budget_leaves_nothing_free():
    device = Device(budget_bytes=40 * MIB)
    device.take(30 * MIB)
    device.pool.budget_bytes = 20 * MIB
    assert (device.pool.free_bytes, device.pool.total_bytes) == (0, 20 * MIB)


def test_the_error_is_cudas_word_for_word_but_for_the_devices_name():
    device = Device(budget_bytes=30 * MIB)
    device.take(3 * MIB)
    device.pool.fraction = 0.9
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.take(18 * MIB)
    assert str(caught.value) == (
        "sim:0 out of memory. Tried to allocate 18.00 MiB. GPU 0 has a total capacity of 30.00 MiB"
        " of which 10.00 MiB is free. Including non-PyTorch memory, this process has 20.00 MiB"
        " memory in use. 27.00 MiB allowed; Of the allocated memory 3.00 MiB is allocated by"
        " PyTorch, and 17.00 MiB is reserved by PyTorch but unallocated. If reserved but"
        " unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        " to avoid fragmentation.  See documentation for Memory Management "
        " (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert device.stats("num_ooms", "num_alloc_retries") == [1, 1]


def test_peaks_and_totals_start_again_in_each_pool():
    device = Device()
    device.pool.free(device.take(3 * MIB))
    device.pool.reset_peaks()
    device.pool.reset_totals()
    names = [f"allocated_bytes.{group}.{part}" for group in GROUPS for part in ("peak", "freed")]
    assert device.stats(*names) == [0] * 6
    assert device.stats("reserved_bytes.large_pool.peak", "num_device_alloc") == [20 * MIB, 0]


def test_a_planted_failure_needs_no_budget_and_changes_nothing():
    device = Device()
    device.pool.fail_at(1)
    with pytest.raises(torch.OutOfMemoryError, match=r"planted with fail_at\(\)\.$"):
        device.take(8)
    assert device.pool.reserved_bytes == 0


def test_an_empty_allocation_is_not_one():
    device = Device(budget_bytes=0)
    device.pool.fail_at(1)
    device.pool.free(device.take(0))
    assert device.pool.failure_is_planted


def test_a_block_freed_in_the_middle_of_an_allocation_waits_for_its_end(monkeypatch):
    device = Device()
    blocks = [device.take(4 * MIB) for _ in range(3)]
    plain = device.pool._take

    def collects_garbage(*args):
        device.pool.free(blocks.pop())
        return plain(*args)

    monkeypatch.setattr(device.pool, "_take", collects_garbage)
    taken = device.take(8 * MIB)
    assert taken.address not in {block.address for block in blocks}
    check(device.pool, [(block, 4 * MIB, 0) for block in blocks] + [(taken, 8 * MIB, 0)])
