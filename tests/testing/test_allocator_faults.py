"""Small wrong programs: each passes where every allocation stands for itself, and fails on CUDA."""

import pytest
import torch

pytestmark = pytest.mark.simdevice

MIB = 1 << 20


def taken(sim, n_mib):
    return torch.empty(n_mib * MIB, dtype=torch.uint8, device=sim.device)


@pytest.fixture(params=["exact", "cuda"])
def expectation(request, sim):
    """Start the device with each allocator; only CUDA's finds the fault."""

    def start(**settings):
        sim(allocator=request.param, **settings)
        if request.param == "exact":
            return pytest.MonkeyPatch.context()
        return pytest.raises(torch.OutOfMemoryError, match="is reserved by PyTorch")

    return start


def test_a_fragmented_cache_is_no_room_for_a_larger_tensor(sim, expectation):
    fault = expectation(budget="400MiB")
    blocks = [taken(sim, 4) for _ in range(100)]
    kept = blocks[::5]
    del blocks
    assert sim.allocated_bytes == 80 * MIB
    with fault:
        taken(sim, 20)
    assert len(kept) == 20


def test_a_tensor_of_2_mib_needs_a_segment_of_20(sim, expectation):
    with expectation(budget="12MiB"):
        taken(sim, 2)


def test_what_one_stream_let_go_is_no_room_for_another(sim, expectation):
    fault = expectation(budget="40MiB")
    kept, gone = taken(sim, 2), taken(sim, 16)
    del gone
    with sim.module.stream(sim.module.Stream()):
        other = taken(sim, 20)
        with fault:
            taken(sim, 16)
    assert kept.nbytes + other.nbytes + taken(sim, 16).nbytes == 38 * MIB


def test_the_rest_of_a_large_block_that_is_not_split_is_nobodys(sim, expectation):
    fault = expectation(budget="48MiB")
    kept = [taken(sim, 11) for _ in range(4)]
    with fault:
        taken(sim, 1)
    assert sum(tensor.nbytes for tensor in kept) == 44 * MIB


def test_tensors_of_one_byte_take_512(sim, expectation):
    fault = expectation(budget="2MiB")
    kept = [torch.empty(1, dtype=torch.uint8, device=sim.device) for _ in range(4096)]
    with fault:
        torch.empty(1, dtype=torch.uint8, device=sim.device)
    assert len(kept) == 4096


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
    assert sim.module.get_per_process_memory_fraction() == 0.015


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_is_a_share(sim, fraction):
    sim(allocator="cuda")
    with pytest.raises(ValueError, match="Allowed range: 0~1"):
        sim.module.set_per_process_memory_fraction(fraction)
    with pytest.raises(TypeError, match="must be `float`"):
        sim.module.set_per_process_memory_fraction(1)


def test_the_exact_allocator_has_no_fraction(sim):
    set_fraction = sim(allocator="cuda").module.set_per_process_memory_fraction
    sim(allocator="exact")
    assert not hasattr(sim.module, "set_per_process_memory_fraction")
    assert not hasattr(sim.module, "get_per_process_memory_fraction")
    with pytest.raises(RuntimeError, match="an allocator without a fraction"):
        set_fraction(0.5)


def test_another_allocator_is_named(sim):
    with pytest.raises(ValueError, match="there is no allocator 'cudaMallocAsync'; there are"):
        sim(allocator="cudaMallocAsync")


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


def test_memory_is_told_as_torch_cuda_tells_it(sim):
    sim(allocator="cuda", budget="100MiB")
    module, kept = sim.module, taken(sim, 3)
    assert (module.memory_allocated(), module.memory_reserved()) == (3 * MIB, 20 * MIB)
    assert module.mem_get_info() == (80 * MIB, 100 * MIB)
    assert module.get_device_properties(0).total_memory == 100 * MIB
    nested = module.memory_stats_as_nested_dict()
    assert nested["reserved_bytes"]["large_pool"]["current"] == 20 * MIB
    assert torch.accelerator.memory_reserved(sim.device) == 20 * MIB
    del kept
    module.empty_cache()
    assert (module.memory_reserved(), module.max_memory_reserved()) == (0, 20 * MIB)
    module.reset_peak_memory_stats()
    assert module.max_memory_reserved() == 0


def test_a_lowered_budget_is_not_served_from_the_cache_of_before(sim):
    sim(allocator="cuda")
    gone = taken(sim, 40)
    del gone
    sim.budget_bytes = "30MiB"
    with pytest.raises(torch.OutOfMemoryError):
        taken(sim, 40)
