"""What a plan says that blocks take, and a replay that a record takes, is what the allocator takes.

By private names, which are compared with the simulated allocator at sizes that no model brings
about.
"""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenure._cuda_blocks import MIB, taken_by, whole_block_bytes
from tenure.adaptive._predict._blocks import BlockEvent, LiveBlock, MemoryRecord, replay
from tenure.testing._allocator import CachingPool

SIZES = st.one_of(
    st.integers(1, 3 * MIB),
    st.integers(1, 32 * MIB),
    st.sampled_from([511, 512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 20 * MIB + 1]),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(SIZES, max_size=8))
def test_blocks_take_what_the_allocator_says(sim, sizes):
    sim(allocator="cuda")
    blocks = [torch.empty(n_bytes, dtype=torch.uint8, device=sim.device) for n_bytes in sizes]
    taken = taken_by(sizes, sim.device)
    assert taken.allocated_bytes == sim.allocated_bytes
    assert taken.reserved_bytes == sim.reserved_bytes
    del blocks


@given(n_bytes=st.integers(1, 64 * MIB))
def test_a_whole_block_is_not_rounded_any_more(n_bytes):
    device = torch.device("cuda:0")
    whole_bytes = whole_block_bytes(n_bytes, device)
    assert n_bytes <= whole_bytes < n_bytes + 2 * MIB
    assert whole_block_bytes(whole_bytes, device) == whole_bytes
    taken = taken_by([whole_bytes], device)
    assert taken.allocated_bytes == whole_bytes
    assert taken.reserved_bytes == whole_bytes or whole_bytes < 10 * MIB


def test_on_the_cpu_a_block_takes_its_bytes():
    device = torch.device("cpu")
    taken = taken_by([3, 11 * MIB + 1], device)
    assert taken.allocated_bytes == taken.reserved_bytes == 11 * MIB + 4
    assert whole_block_bytes(11 * MIB + 1, device) == 11 * MIB + 1


# --- records that are replayed

RECORDED = st.one_of(
    st.integers(0, 5000),
    st.integers(MIB - 2000, MIB + 2000),
    st.integers(1, 12 * MIB),
    st.integers(10 * MIB - 1000, 40 * MIB),
)
# the size that a block gets, and which: a new one, or one of before, which grows or dies
CHANGES = st.lists(st.tuples(RECORDED, st.booleans(), st.integers(0, 1000)), max_size=80)


def record_of(existing, changes):
    record = MemoryRecord(existing={LiveBlock(n_bytes): n_bytes for n_bytes in existing})
    blocks = list(record.existing)
    for n_bytes, is_new, which in changes:
        if is_new or not blocks:
            blocks.append(LiveBlock(n_bytes))
            record.events.append(BlockEvent(blocks[-1], n_bytes, 0))
        elif which % 4:
            record.events.append(BlockEvent(blocks.pop(which % len(blocks)), 0, 0))
        else:
            record.events.append(BlockEvent(blocks[which % len(blocks)], n_bytes, 0))
    return record


def true_figures(record, budget):
    """The same on a port of CUDA's allocator: peaks of allocated and reserved bytes, if it fits."""
    pool = CachingPool(budget, lambda _: None, lambda: 0.0)
    try:
        places = {b: pool.allocate(n_bytes, 0.0) for b, n_bytes in record.existing.items()}
        for block, n_bytes, _ in record.events:
            place = pool.allocate(n_bytes, 0.0)
            pool.free(places.get(block))
            places[block] = place
    except torch.OutOfMemoryError:
        return None
    return pool.peak_bytes, pool.counters["reserved_bytes"].peak


@settings(max_examples=300, deadline=None)
@given(existing=st.lists(RECORDED, max_size=10), changes=CHANGES, budget=st.integers(0, 200))
def test_a_replay_is_the_allocator_to_the_byte(existing, changes, budget):
    record = record_of(existing, changes)
    unbounded = replay(record)
    assert (*unbounded,) == (*true_figures(record, None), True)
    bounded, truth = replay(record, budget * MIB), true_figures(record, budget * MIB)
    assert bounded[2] == (truth is not None)
    if truth is not None:
        assert bounded[:2] == truth
