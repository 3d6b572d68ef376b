"""Pinned memory, and the errors of the runtime that the next launch raises."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

OUT_OF_MEMORY = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs"


@pytest.fixture
def host():
    return torch.zeros(1 << 10)


def register(sim, host):
    return sim.module.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)


def test_pinned_memory_is_a_copy_that_says_so(sim):
    plain = torch.arange(4)
    host = plain.pin_memory()
    assert host.is_pinned()
    assert host[1:3].is_pinned()
    assert not plain.is_pinned()
    assert torch.equal(host, plain)
    assert host.pin_memory() is host
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() for (batch,) in loader)


def test_a_range_is_pinned_in_place_and_answers_with_the_codes_of_cuda(sim):
    runtime, host = sim.module.cudart(), torch.zeros(100)
    address, pinned = host.data_ptr(), torch.zeros(4).pin_memory()
    assert runtime.cudaHostRegister(address, 0, 0) == 1
    assert runtime.cudaHostUnregister(address) == 713
    assert runtime.cudaHostRegister(address, 200, 0) == 0
    assert runtime.cudaHostRegister(address + 8, 8, 0) == 712
    assert host[:50].is_pinned()
    assert not host.is_pinned()
    assert runtime.cudaHostUnregister(address) == 0
    assert not host[:50].is_pinned()
    assert runtime.cudaHostUnregister(pinned.data_ptr()) == 713
    assert pinned.is_pinned()


def test_a_failed_registration_is_raised_by_the_next_launch_and_by_none_after(sim, host):
    x = torch.zeros(4, device=sim.device)
    sim.fail_pinning("all")
    assert register(sim, host) == 2
    with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY) as raised:
        x.add_(1)
    assert raised.value.error_code == 2
    assert not isinstance(raised.value, torch.OutOfMemoryError)
    # what torch itself pins raises at once
    for pin in (host.pin_memory, lambda: x.to("cpu", non_blocking=True)):
        with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY):
            pin()
    x.add_(1)
    # The first kernel ran: it was looked at after its launch.
    assert x.tolist() == [2, 2, 2, 2]
    sim.fail_pinning(None)
    assert host.pin_memory().is_pinned()


def test_the_error_stays_in_its_thread(sim, host):
    x = torch.zeros(4, device=sim.device)
    sim.fail_pinning("all")
    with ThreadPoolExecutor(1) as other:
        other.submit(register, sim, host).result()
        x.add_(1)
        with pytest.raises(torch.AcceleratorError):
            other.submit(x.add_, 1).result()


@pytest.mark.parametrize(("fails", "codes"), [(2, [0, 2, 0]), ("3KiB", [0, 0, 2])])
def test_one_number_fails_once_and_no_more_than_a_size_is_pinned_at_a_time(sim, fails, codes):
    hosts = [torch.zeros(256) for _ in range(3)]
    resting = torch.zeros(256).pin_memory()
    sim.fail_pinning(fails)
    assert [register(sim, host) for host in hosts] == codes
    assert [host.is_pinned() for host in hosts] == [code == 0 for code in codes]
    if fails == "3KiB":
        assert sim.module.cudart().cudaHostUnregister(hosts[0].data_ptr()) == 0
        del resting
        assert register(sim, hosts[2]) == 0
    sim.fail_pinning(None)
    sim.module.synchronize()
    with pytest.raises(torch.AcceleratorError):
        torch.empty(1, device=sim.device)
