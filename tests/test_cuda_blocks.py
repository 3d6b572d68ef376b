"""What a plan says that blocks take is what the caching allocator's rules take for them."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenure._cuda_blocks import MIB, taken_by, whole_block_bytes

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
