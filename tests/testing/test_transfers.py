import pytest
import torch

from tenure.testing import RaceError, Rates

SLOW = Rates(
    h2d_bytes_per_s=1000.0,
    d2h_bytes_per_s=500.0,
    pageable_bytes_per_s=100.0,
    copy_latency_s=0.0,
    host_copy_s=0.0,
)


def test_values_survive_the_way_there_and_back_in_every_type(sim):
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        x = torch.tensor([0, 1, 1]).to(dtype)
        assert torch.equal(x.to(sim.device).cpu(), x)


def test_moving_and_converting_happen_in_one_call(sim):
    x = torch.tensor([1.5, 2.5]).to(sim.device, torch.float16)
    assert (x.dtype, x.device) == (torch.float16, sim.device)
    assert x.to("cpu", torch.int64).tolist() == [1, 2]
    assert x.to(torch.float32).device == sim.device


def test_pinned_copies_run_at_the_speed_of_the_link_and_pageable_ones_do_not(sim):
    sim(rates=SLOW)
    host = torch.zeros(1000, dtype=torch.uint8)
    device = host.pin_memory().to(sim.device)
    assert sim.busy_s("h2d") == 1.0
    host.to(sim.device)
    assert sim.busy_s("h2d") == 1.0 + 10.0
    device.cpu()
    assert sim.busy_s("d2h") == 10.0
    assert sim.copied_bytes("h2d") == 2000
    assert sim.copied_bytes("d2h") == 1000


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"), [(True, True, 0), (True, False, 1), (False, True, 1)]
)
def test_only_an_asynchronous_copy_from_pinned_memory_lets_the_host_run_on(
    sim, pinned, non_blocking, waits
):
    host = torch.zeros(100).pin_memory() if pinned else torch.zeros(100)
    host.to(sim.device, non_blocking=non_blocking)
    assert sim.host_waits == waits
    sim.module.synchronize()


def test_a_copy_into_a_ring_slot_that_is_still_read_is_caught(sim):
    slot = torch.zeros(100, device=sim.device)
    host = torch.ones(100).pin_memory()
    copies = sim.module.Stream()
    copies.wait_stream(sim.module.current_stream())
    slot.sum()
    with sim.module.stream(copies), pytest.raises(RaceError, match="WAR: stream"):
        slot.copy_(host, non_blocking=True)
    assert len(sim.take_faults()) == 1


@pytest.mark.parametrize(
    ("host", "device"),
    [
        (torch.zeros(4, 2).t(), torch.zeros(2, 4)),
        (torch.zeros(2, 8)[:, ::2], torch.zeros(2, 4)),
        (torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, 4)),
    ],
)
def test_a_copy_that_changes_type_or_layout_is_as_slow_as_a_pageable_one(sim, host, device):
    sim(rates=SLOW)
    pinned = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype)
    sim.module.cudart().cudaHostRegister(pinned.data_ptr(), pinned.untyped_storage().nbytes(), 0)
    target = torch.empty_strided(device.size(), device.stride(), device=sim.device)
    before = sim.host_waits
    target.copy_(pinned, non_blocking=True)
    assert sim.busy_s("h2d") == target.nbytes / SLOW.pageable_bytes_per_s
    assert sim.host_waits == before + 1


def test_part_of_a_pinned_buffer_moves_at_the_speed_of_the_link(sim):
    sim(rates=SLOW)
    host = torch.zeros(10, 4).pin_memory()
    order = torch.zeros(2, 3, device=sim.device).t()
    order.copy_(torch.zeros(2, 3).t().pin_memory(), non_blocking=True)
    torch.empty(3, 4, device=sim.device).copy_(host[2:5], non_blocking=True)
    assert sim.busy_s("h2d") == pytest.approx((24 + 48) / SLOW.h2d_bytes_per_s)
    sim.module.synchronize()
