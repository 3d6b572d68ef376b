import pytest
import torch

from tenure.testing import RaceError


def pinned(*values):
    return torch.tensor(values).pin_memory()


def test_overwriting_the_source_of_a_copy_in_flight_is_caught(sim):
    host = pinned(1.0, 2.0)
    device = host.to(sim.device, non_blocking=True)
    host.fill_(9)
    with pytest.raises(RaceError, match="host overwrite: pinned host memory was written while"):
        sim.module.synchronize()
    assert len(sim.take_faults()) == 1
    assert device.tolist() == [1, 2]


def test_waiting_for_another_stream_does_not_release_the_source(sim):
    host = pinned(1.0, 2.0)
    host.to(sim.device, non_blocking=True)
    sim.module.Stream().synchronize()
    host.fill_(9)
    with pytest.raises(RaceError, match="host overwrite"):
        sim.finish()
    sim.take_faults()


def test_reading_the_target_of_a_copy_in_flight_gives_poison(sim):
    device = torch.tensor([1.0, 2.0], device=sim.device)
    host = pinned(0.0, 0.0)
    host.copy_(device, non_blocking=True)
    done = sim.module.current_stream().record_event()
    assert host.isnan().all()
    while not done.query():
        pass
    assert host.tolist() == [1, 2]


def test_other_work_ordered_after_the_copy_does_not_deliver_it_to_the_host(sim):
    host, other = pinned(0.0, 0.0), pinned(3.0, 4.0)
    host.copy_(torch.ones(2, device=sim.device), non_blocking=True)
    there = other.to(sim.device, non_blocking=True)
    other.copy_(there, non_blocking=True)
    assert host.isnan().all()
    sim.module.synchronize()
    assert (host.tolist(), other.tolist()) == ([1, 1], [3, 4])


def test_device_work_that_nothing_orders_after_the_copy_is_caught(sim):
    device = torch.tensor([1.0, 2.0], device=sim.device)
    host = pinned(0.0, 0.0)
    host.copy_(device, non_blocking=True)
    side = sim.module.Stream()
    with sim.module.stream(side), pytest.raises(RaceError, match="RAW"):
        host.to(sim.device, non_blocking=True)
    assert len(sim.take_faults()) == 1
    sim.module.synchronize()


def test_a_buffer_may_go_out_and_come_back_on_one_stream(sim):
    host = pinned(1.0, 2.0)
    device = host.to(sim.device, non_blocking=True)
    device.mul_(10)
    host.copy_(device, non_blocking=True)
    sim.module.synchronize()
    assert host.tolist() == [10, 20]


def test_strided_targets_receive_their_elements_only(sim):
    device = torch.tensor([1.0, 2.0], device=sim.device)
    host = torch.zeros(4).pin_memory()
    host[::2].copy_(device, non_blocking=True)
    sim.module.synchronize()
    assert host.tolist() == [1, 0, 2, 0]


def test_without_the_detector_copies_deliver_at_once(sim):
    sim(detect_races=False)
    host = pinned(0.0, 0.0)
    host.copy_(torch.ones(2, device=sim.device), non_blocking=True)
    assert host.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_every_type_of_element_goes_out_and_comes_back(sim, dtype):
    host = torch.tensor([1.0, 0.0]).to(dtype).pin_memory()
    device = host.to(sim.device, non_blocking=True)
    back = torch.zeros(2, dtype=dtype).pin_memory()
    back.copy_(device, non_blocking=True)
    sim.module.synchronize()
    assert torch.equal(back.view(torch.uint8), host.view(torch.uint8))
