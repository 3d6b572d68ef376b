"""Small wrong programs: each passes where every allocation stands for itself, and fails on CUDA."""

import pytest
import torch

pytestmark = pytest.mark.simdevice

MIB = 1 << 20


def taken(sim, n_mib):
    return torch.empty(int(n_mib * MIB), dtype=torch.uint8, device=sim.device)


def fragmented(sim):
    blocks = [taken(sim, 4) for _ in range(100)]
    return blocks[::5], lambda: taken(sim, 20)


def a_first_tensor_of_2_mib(sim):
    return [], lambda: taken(sim, 2)


def freed_on_another_stream(sim):
    kept, gone = taken(sim, 2), taken(sim, 16)
    del gone
    side = sim.module.Stream()
    with sim.module.stream(side):
        other = taken(sim, 20)

    def fault():
        with sim.module.stream(side):
            return taken(sim, 16)

    return [kept, other], fault


def the_rest_of_blocks_that_are_not_split(sim):
    return [taken(sim, 11) for _ in range(4)], lambda: taken(sim, 1)


def tensors_of_a_little_more_than_512_bytes(sim):
    kept = [taken(sim, 513 / MIB) for _ in range(2048)]
    return kept, lambda: taken(sim, 513 / MIB)


@pytest.mark.parametrize(
    ("program", "budget"),
    [
        (fragmented, "400MiB"),
        (a_first_tensor_of_2_mib, "12MiB"),
        (freed_on_another_stream, "40MiB"),
        (the_rest_of_blocks_that_are_not_split, "48MiB"),
        (tensors_of_a_little_more_than_512_bytes, "2MiB"),
    ],
)
def test_only_the_allocator_of_cuda_finds_the_fault(sim, program, budget):
    sim(allocator="exact", budget=budget)
    kept, fault = program(sim)
    fault()
    sim(allocator="cuda", budget=budget)
    kept, fault = program(sim)
    with pytest.raises(torch.OutOfMemoryError, match="is reserved by PyTorch"):
        fault()
    del kept


def test_cached_memory_of_the_other_pool_is_given_back_before_an_error(sim):
    sim(allocator="cuda", budget="20MiB")
    small = [taken(sim, 1) for _ in range(20)]
    small.clear()
    assert sim.reserved_bytes == 20 * MIB
    assert taken(sim, 2).nbytes == 2 * MIB
    assert sim.module.memory_stats()["num_alloc_retries"] == 1


def test_a_fraction_counts_what_is_reserved(sim):
    sim(allocator="cuda", budget="1000MiB")
    first = taken(sim, 2)
    sim.module.set_per_process_memory_fraction(0.015)  # 15 MiB, while 20 are reserved
    # A limit of the bytes that are allocated it is not: 16 MiB more come from the cache ...
    second = taken(sim, 16)
    assert sim.allocated_bytes == 18 * MIB
    # ... and the first small tensor is refused, for which a segment of 2 MiB is wanted.
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 2\.00 MiB.*15\.00 MiB allowed"):
        torch.empty(1, device=sim.device)
    assert first.nbytes + second.nbytes == 18 * MIB
    sim(allocator="exact")
    assert not hasattr(sim.module, "set_per_process_memory_fraction")


def test_a_recorded_stream_keeps_a_block_from_the_next_tensor(sim):
    sim(allocator="cuda", budget="20MiB")
    module, side = sim.module, sim.module.Stream()
    first = taken(sim, 16).zero_()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        first.add_(1)
    first.record_stream(side)
    del first
    assert (sim.allocated_bytes, module.memory_stats()["active_bytes.all.current"]) == (0, 16 << 20)
    waits = sim.host_waits
    taken(sim, 16)
    assert sim.host_waits > waits  # for the stream, before the segment is given back


def test_a_snapshot_tells_where_a_storage_lies(sim):
    sim(allocator="cuda")
    with sim.module.stream(side := sim.module.Stream()):
        tensor = taken(sim, 3)
    (segment,) = sim.module.memory_snapshot()
    assert segment["stream"] == side.stream_id
    assert tensor.untyped_storage().data_ptr() == segment["blocks"][0]["address"]
    assert tensor[5:].data_ptr() == tensor.data_ptr() + 5 == segment["address"] + 5
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    tensor.untyped_storage().resize_(0)
    assert sim.allocated_bytes == 0
    other = taken(sim, 3)  # on the default stream, so in another segment
    tensor.untyped_storage().resize_(3 * MIB)
    assert sim.reserved_bytes == 40 * MIB
    assert other.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_reserved_memory_is_told_apart_and_goes_with_the_cache(sim):
    sim(allocator="cuda", budget="100MiB")
    module, kept = sim.module, taken(sim, 3)
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
    gone = taken(sim, 40)
    del gone
    sim.budget_bytes = "30MiB"  # which the cache from before does not serve
    with pytest.raises(torch.OutOfMemoryError):
        taken(sim, 40)
