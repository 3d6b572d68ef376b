"""DLPack gives bytes of the device to a storage that owns none of them."""

import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from tenure.testing import RaceError


def part_of(whole, low, high):
    return from_dlpack(to_dlpack(whole[low:high]))


def test_a_part_has_a_storage_of_its_own_over_the_same_bytes(sim):
    whole = torch.zeros(64, dtype=torch.uint8, device=sim.device)
    part = part_of(whole, 16, 32)
    assert part.untyped_storage().nbytes() == 16
    assert sim.allocated_bytes == 64
    part[:4].view(torch.float32).fill_(1.0)
    assert whole[16:20].cpu().view(torch.float32).tolist() == [1.0]
    whole[20] = 7
    assert part.t()[4].item() == 7
    assert whole.sum().item() == 0x80 + 0x3F + 7


def test_a_part_keeps_the_whole_alive(sim):
    part = part_of(torch.ones(64, device=sim.device), 8, 16)
    assert sim.allocated_bytes == 256
    assert part.sum().item() == 8
    del part
    assert sim.allocated_bytes == 0


def test_what_races_with_the_whole_races_with_its_part(sim):
    whole = torch.zeros(64, device=sim.device)
    part, apart = part_of(whole, 0, 8), part_of(whole, 8, 16)
    stream = sim.module.Stream()
    stream.wait_stream(sim.module.current_stream())
    with sim.module.stream(stream):
        part.fill_(1)
    assert apart.sum().item() == 0
    with pytest.raises(RaceError, match=r"^RAW: .* bytes 0 to 32 of a tensor"):
        whole.sum()
    sim.module.current_stream().wait_stream(stream)
    sim.take_faults()


def test_a_stream_recorded_for_a_part_is_a_fault_because_cuda_ignores_it(sim):
    whole = torch.zeros(64, device=sim.device)
    stream = sim.module.Stream()
    whole.record_stream(stream)
    assert not sim.take_faults()
    part_of(whole, 0, 8).record_stream(stream)
    (fault,) = sim.take_faults()
    assert fault.startswith(
        "record_stream() of float32[8] on sim:0, 32 B does nothing: its storage"
    )
