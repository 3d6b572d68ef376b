"""The accounting of CUDA's caching allocator: its invariants, and the words of its error."""

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.sim_allocator("cuda")

MIB = 1 << 20
GROUPS = ("all", "small_pool", "large_pool")


def taken(sim, n_bytes, stream=None):
    with sim.module.stream(stream):
        return torch.empty(n_bytes, dtype=torch.uint8, device=sim.device)


SIZES = st.one_of(
    st.integers(0, 5000),
    st.integers(MIB - 2000, MIB + 2000),
    st.integers(1, 12 * MIB),
    st.integers(10 * MIB - 1000, 40 * MIB),
)
ACTS = st.one_of(
    st.tuples(st.just("take"), SIZES, st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(0, 1000), st.booleans()),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.just(0)),
)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(acts=st.lists(ACTS, max_size=40), budget_mib=st.none() | st.integers(0, 120))
def test_after_anything_blocks_tile_their_segments_and_all_figures_agree(sim, acts, budget_mib):
    budget = None if budget_mib is None else budget_mib * MIB
    sim(allocator="cuda", budget=budget, detect_races=False)
    streams = [sim.module.current_stream(), sim.module.Stream(), sim.module.Stream()]
    live = []
    for act, number, detail in acts:
        if act == "take":
            try:
                live.append((taken(sim, number, streams[detail]), streams[detail].stream_id))
            except torch.OutOfMemoryError:
                assert budget is not None
        elif act == "free" and live:
            gone, _ = live.pop(number % len(live))
            if detail and gone.nbytes:
                sim.launch_kernel(1.0)
                gone.record_stream(streams[0])
            del gone
        elif act == "empty":
            sim.module.empty_cache()
            kept = [each["blocks"] for each in sim.module.memory_snapshot()]
            assert all(any(b["state"] != "inactive" for b in blocks) for blocks in kept)
        else:
            sim.module.synchronize()
        check(sim, [(x, stream) for x, stream in live if x.nbytes], budget)
    live.clear()


def check(sim, live, budget):
    """Every rule that a state of the allocator keeps, read from what it tells of itself."""
    segments = sim.module.memory_snapshot()
    for segment in segments:
        check_segment(segment)
    told = [
        (block["address"], block["requested_size"], segment["stream"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert sorted(told) == sorted((x.data_ptr(), x.nbytes, stream) for x, stream in live)
    stats = sim.module.memory_stats()
    for group in GROUPS:
        kind = {"small_pool": "small", "large_pool": "large"}.get(group)
        check_figures(stats, group, [s for s in segments if kind in (None, s["segment_type"])])
    assert budget is None or sim.reserved_bytes <= budget


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
    assert segment["total_size"] % (2 * MIB) == 0
    assert (segment["segment_type"] == "small") <= (segment["total_size"] == 2 * MIB)


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


@pytest.mark.parametrize(
    ("n_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
    ],
)
def test_what_a_first_request_reserves(sim, n_bytes, allocated_bytes, reserved_bytes):
    kept = taken(sim, n_bytes)
    assert (sim.allocated_bytes, sim.reserved_bytes) == (allocated_bytes, reserved_bytes)
    assert kept.nbytes == sim.requested_bytes == n_bytes


def test_the_smallest_free_block_that_fits_is_taken(sim):
    blocks = [taken(sim, n * MIB) for n in (4, 2, 3, 2)]
    places = [block.data_ptr() for block in blocks]
    del blocks[2], blocks[0]
    assert taken(sim, 3 * MIB).data_ptr() == places[2]
    assert taken(sim, 4 * MIB).data_ptr() == places[0]


def test_a_full_device_gives_back_whole_segments_waits_for_its_work_and_tries_again(sim):
    sim(allocator="cuda", budget="40MiB")
    kept, gone = taken(sim, 2 * MIB), taken(sim, 20 * MIB)
    sim.launch_kernel(1.0, writes=[gone])
    del gone
    waits = sim.host_waits
    assert taken(sim, 12 * MIB).data_ptr() != kept.data_ptr()
    assert (sim.host_waits, sim.reserved_bytes) == (waits, 40 * MIB)
    other = taken(sim, 18 * MIB, sim.module.Stream())
    assert sim.host_waits > waits
    assert sim.reserved_bytes == 38 * MIB
    assert other.nbytes + kept.nbytes == sim.allocated_bytes
    # cached memory of the other pool is given back as well
    sim(allocator="cuda", budget="20MiB")
    small = [taken(sim, MIB) for _ in range(20)]
    small.clear()
    assert sim.reserved_bytes == 20 * MIB
    assert taken(sim, 2 * MIB).nbytes == 2 * MIB
    assert sim.module.memory_stats()["num_alloc_retries"] == 1


def test_the_error_is_cudas_word_for_word_but_for_the_devices_name(sim):
    sim(allocator="cuda", budget="30MiB")
    kept = taken(sim, 3 * MIB)
    sim.module.set_per_process_memory_fraction(0.9)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        taken(sim, 18 * MIB)
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
    stats = sim.module.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
    assert kept.nbytes == sim.allocated_bytes


def test_a_block_freed_in_the_middle_of_an_allocation_waits_for_its_end(sim):
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(100):
            cycle = [taken(sim, 4 * MIB)]
            cycle.append(cycle)
            del cycle
            kept = taken(sim, 8 * MIB)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    check(sim, [(kept, 0)], None)


# --- small wrong programs: each passes where every allocation stands for itself


@pytest.mark.parametrize(
    ("sizes", "kept", "fault_bytes", "budget"),
    [
        ([4 * MIB] * 100, slice(None, None, 5), 20 * MIB, "400MiB"),
        ([], slice(None), 2 * MIB, "12MiB"),
        ([11 * MIB] * 4, slice(None), MIB, "48MiB"),
    ],
    ids=["fragmented", "a segment", "rests of blocks that are not split"],
)
def test_only_the_allocator_of_cuda_finds_the_fault(sim, sizes, kept, fault_bytes, budget):
    sim(allocator="exact", budget=budget)
    held = [taken(sim, n_bytes) for n_bytes in sizes][kept]
    taken(sim, fault_bytes)
    sim(allocator="cuda", budget=budget)
    held = [taken(sim, n_bytes) for n_bytes in sizes][kept]
    with pytest.raises(torch.OutOfMemoryError, match="is reserved by PyTorch"):
        taken(sim, fault_bytes)
    del held


def test_a_fraction_counts_what_is_reserved(sim):
    sim(allocator="cuda", budget="1000MiB")
    first = taken(sim, 2 * MIB)
    sim.module.set_per_process_memory_fraction(0.015)  # 15 MiB, while 20 are reserved
    # A limit of the bytes that are allocated it is not: 16 MiB more come from the cache ...
    second = taken(sim, 16 * MIB)
    assert sim.allocated_bytes == 18 * MIB
    # ... and the first small tensor is refused, for which a segment of 2 MiB is wanted.
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 2\.00 MiB.*15\.00 MiB allowed"):
        torch.empty(1, device=sim.device)
    assert first.nbytes + second.nbytes == 18 * MIB
    sim(allocator="exact")
    assert not hasattr(sim.module, "set_per_process_memory_fraction")


def test_a_snapshot_tells_where_a_storage_lies(sim):
    sim(allocator="cuda")
    with sim.module.stream(side := sim.module.Stream()):
        tensor = taken(sim, 3 * MIB)
    (segment,) = sim.module.memory_snapshot()
    assert segment["stream"] == side.stream_id
    assert tensor.untyped_storage().data_ptr() == segment["blocks"][0]["address"]
    assert tensor[5:].data_ptr() == tensor.data_ptr() + 5 == segment["address"] + 5
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    tensor.untyped_storage().resize_(0)
    assert sim.allocated_bytes == 0
    other = taken(sim, 3 * MIB)  # on the default stream, so in another segment
    tensor.untyped_storage().resize_(3 * MIB)
    assert sim.reserved_bytes == 40 * MIB
    assert other.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_reserved_memory_is_told_apart_and_goes_with_the_cache(sim):
    sim(allocator="cuda", budget="100MiB")
    module, kept = sim.module, taken(sim, 3 * MIB)
    assert (module.memory_allocated(), module.memory_reserved()) == (3 * MIB, 20 * MIB)
    assert module.mem_get_info() == (80 * MIB, 100 * MIB)
    assert module.get_device_properties(0).total_memory == 100 * MIB
    nested = module.memory_stats_as_nested_dict()
    assert nested["reserved_bytes"]["large_pool"]["current"] == 20 * MIB
    del kept
    module.empty_cache()
    assert (module.memory_reserved(), module.max_memory_reserved()) == (0, 20 * MIB)
    module.reset_peak_memory_stats()
    assert module.max_memory_reserved() == 0
    gone = taken(sim, 40 * MIB)
    del gone
    sim.budget_bytes = "30MiB"  # which the cache from before does not serve
    with pytest.raises(torch.OutOfMemoryError):
        taken(sim, 40 * MIB)
