import threading

import pytest
import torch

OUT_OF_MEMORY = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs"


@pytest.fixture
def host():
    return torch.zeros(1 << 10)


def register(sim, host):
    return sim.module.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)


def unregister(sim, host):
    return sim.module.cudart().cudaHostUnregister(host.data_ptr())


def test_a_failed_registration_is_raised_by_the_next_launch_and_by_none_after(sim, host):
    x = torch.zeros(4, device=sim.device)
    sim.fail_pinning("all")
    assert register(sim, host) == 2
    with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY) as raised:
        x.add_(1)
    assert raised.value.error_code == 2
    assert not isinstance(raised.value, torch.OutOfMemoryError)
    x.add_(1)
    # The first kernel ran: it was looked at after its launch.
    assert x.tolist() == [2, 2, 2, 2]


def test_a_failed_registration_is_raised_by_the_next_allocation(sim, host):
    sim(fail_pinning="all")
    register(sim, host)
    with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY):
        torch.empty(4, device=sim.device)
    assert sim.allocated_bytes == 0
    torch.empty(4, device=sim.device)


def test_the_caching_allocator_looks_before_a_new_segment_only(sim, host):
    sim(allocator="cuda")
    first = torch.empty(4, device=sim.device)
    sim.fail_pinning("all")
    register(sim, host)
    kept = torch.empty(4, device=sim.device)
    with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY):
        torch.empty(1 << 24, device=sim.device)
    assert first.data_ptr() != kept.data_ptr()


def test_an_operator_that_can_not_allocate_for_it_has_not_written(sim, host):
    x = torch.ones(4, device=sim.device)
    running = torch.zeros(1, device=sim.device), torch.ones(1, device=sim.device)
    sim.fail_pinning("all")
    register(sim, host)
    with pytest.raises(torch.AcceleratorError):
        torch.native_batch_norm(x.view(4, 1), None, None, *running, True, 0.5, 0.0)
    assert running[0].tolist() == [0]


def test_a_copy_within_the_device_looks_and_copies_over_the_link_do_not(sim, host):
    x, y = torch.zeros(4, device=sim.device), torch.zeros(4, device=sim.device)
    pinned = torch.ones(4).pin_memory()
    sim.fail_pinning("all")
    register(sim, host)
    x.copy_(pinned, non_blocking=True)
    sim.module.synchronize()
    assert x.cpu().tolist() == [1, 1, 1, 1]
    assert x[0].item() == 1
    with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY):
        y.copy_(x)
    y.copy_(x)


def test_a_failed_unregistration_is_left_behind_too(sim, host):
    x = torch.zeros(4, device=sim.device)
    assert unregister(sim, host) == 713
    with pytest.raises(torch.AcceleratorError, match="pointer does not correspond to a registered"):
        x.add_(1)


def test_every_code_leaves_its_own_error(sim, host):
    x, runtime = torch.zeros(4, device=sim.device), sim.module.cudart()
    register(sim, host)
    assert register(sim, host) == 712
    with pytest.raises(torch.AcceleratorError, match="the requested memory range is already mapp"):
        x.add_(1)
    assert runtime.cudaHostRegister(host.data_ptr(), 0, 0) == 1
    with pytest.raises(torch.AcceleratorError, match="invalid argument"):
        x.add_(1)
    assert runtime.cudaGetErrorString(2) == "out of memory"


def test_the_error_stays_in_its_thread(sim, host):
    x, raised = torch.zeros(4, device=sim.device), []

    def work():
        register(sim, host)
        ready.set()
        looked.wait()
        try:
            x.add_(1)
        except torch.AcceleratorError as error:
            raised.append(error)

    sim.fail_pinning("all")
    ready, looked = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    x.add_(1)
    looked.set()
    thread.join()
    assert len(raised) == 1


def test_an_event_that_is_not_ready_takes_the_error_away(sim, host):
    x = torch.zeros(1 << 16, device=sim.device)
    x.add_(1)
    done = sim.module.current_stream().record_event()
    sim.fail_pinning("all")
    register(sim, host)
    assert not done.query()
    x.add_(1)


def test_memory_that_can_not_be_pinned_raises_at_once_and_leaves_nothing(sim, host):
    x = torch.zeros(4, device=sim.device)
    sim.fail_pinning("all")
    with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY):
        host.pin_memory()
    with pytest.raises(torch.AcceleratorError, match=OUT_OF_MEMORY):
        x.to("cpu", non_blocking=True)
    x.add_(1)
    sim.fail_pinning(None)
    assert host.pin_memory().is_pinned()


def test_one_number_fails_once(sim):
    sim(fail_pinning=2)
    hosts = [torch.zeros(4) for _ in range(3)]
    assert [register(sim, host) for host in hosts] == [0, 2, 0]
    assert [host.is_pinned() for host in hosts] == [True, False, True]
    with pytest.raises(torch.AcceleratorError):
        torch.empty(1, device=sim.device)


def test_no_more_than_a_size_is_pinned_at_a_time(sim):
    hosts = [torch.zeros(256) for _ in range(3)]
    resting = [torch.zeros(256).pin_memory()]
    sim.fail_pinning("3KiB")
    assert [register(sim, host) for host in hosts] == [0, 0, 2]
    assert unregister(sim, hosts[0]) == 0
    del resting
    assert register(sim, hosts[2]) == 0
    sim.fail_pinning(None)
    sim.module.synchronize()
    with pytest.raises(torch.AcceleratorError):
        torch.empty(1, device=sim.device)


def test_a_fresh_start_forgets_the_error_and_the_failures(sim, host):
    sim(fail_pinning="all")
    register(sim, host)
    sim()
    torch.zeros(4, device=sim.device)
    assert register(sim, host) == 0


def test_a_number_below_1_is_refused(sim):
    with pytest.raises(ValueError, match=r"fail_pinning=0: .* is counted from 1"):
        sim(fail_pinning=0)
