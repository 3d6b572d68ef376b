import pytest
import torch

from tenure.testing import Rates


def test_a_view_keeps_the_whole_storage_allocated(sim):
    x = torch.zeros(100, device=sim.device)
    view = x[3:5].view(2, 1)
    del x
    assert sim.allocated_bytes == 400
    del view
    assert sim.allocated_bytes == 0


def test_autograd_keeps_what_it_saved_allocated_until_backward(sim):
    x = torch.ones(100, device=sim.device, requires_grad=True)
    loss = x.exp().sum()
    assert sim.allocated_bytes == 400 + 400 + 4
    loss.backward()
    assert sim.allocated_bytes == 400 + 4 + 400  # x, the loss and the gradient


def test_a_caught_failure_holds_none_of_the_temporaries_of_the_failed_operation(sim):
    x = torch.ones(100, device=sim.device)
    before_bytes = sim.allocated_bytes
    sim.fail_at(3)
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        torch.var_mean(x + 1)
    assert caught.tb is not None
    assert sim.allocated_bytes == before_bytes


def test_a_recorded_stream_keeps_the_bytes_active_until_it_is_done(sim):
    sim(rates=Rates(memory_bytes_per_s=1e6))
    side = sim.module.Stream()
    x = torch.zeros(1000, device=sim.device)
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        x.fill_(1)
    x.record_stream(side)
    del x
    assert sim.allocated_bytes == 0
    assert sim.module.memory_stats()["active_bytes.all.current"] == 4000
    side.synchronize()
    assert sim.module.memory_stats()["active_bytes.all.current"] == 0


def test_freeing_on_its_home_stream_what_a_side_stream_uses_is_caught(sim):
    side = sim.module.Stream()
    x = torch.zeros(1000, device=sim.device)
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        x.fill_(1)
    del x
    [fault] = sim.take_faults()
    assert "a block of 3.91 KiB of stream 0 was freed while stream" in fault


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_recorded_stream_waited_for_is_over_before_the_block_is_used_again(sim, waits):
    current, side, third = sim.module.current_stream(), sim.module.Stream(), sim.module.Stream()
    x = torch.zeros(1000, device=sim.device)
    x.record_stream(side)
    third.wait_stream(current)
    with sim.module.stream(third):
        x.fill_(1)
    if waits:
        side.wait_stream(third)
    del x
    assert len(sim.take_faults()) == (0 if waits else 1)


def test_tensors_from_before_a_fresh_start_work_but_do_not_count(sim):
    x = torch.ones(100, device=sim.device)
    sim(budget=1000)
    assert sim.allocated_bytes == 0
    y = x + 1
    assert sim.allocated_bytes == 400
    del x
    assert sim.allocated_bytes == 400
    assert y.sum().item() == 200


def test_an_allocation_that_even_the_host_has_no_room_for_leaves_nothing(sim):
    with pytest.raises(torch.OutOfMemoryError, match="no memory that could stand for it"):
        torch.empty(1 << 58, device=sim.device)
    assert sim.allocated_bytes == sim.peak_bytes == sim.n_allocations == 0
    assert sim.n_ooms == 1
