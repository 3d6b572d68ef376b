import gc
import weakref

import pytest
import torch

from tenure.testing import Rates


def test_a_tensor_is_accounted_exactly_for_as_long_as_it_lives(sim):
    x = torch.empty(1000, dtype=torch.float16, device=sim.device)
    assert sim.allocated_bytes == 2000
    assert sim.n_allocations == 1
    del x
    assert sim.allocated_bytes == 0
    assert sim.peak_bytes == 2000


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


def test_allocations_are_rounded_where_the_test_asks(sim):
    sim(round_to_bytes=512)
    x = torch.empty(1, device=sim.device)
    assert sim.allocated_bytes == 512
    assert sim.module.memory_stats()["requested_bytes.all.current"] == 4
    del x


def test_a_budget_is_honoured_to_the_byte(sim):
    sim(budget=400)
    x = torch.empty(100, device=sim.device)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 1 bytes\..* 0 bytes is free"
    ):
        torch.empty(1, dtype=torch.uint8, device=sim.device)
    del x
    torch.empty(100, device=sim.device)
    assert sim.n_ooms == 1


def test_an_operation_whose_second_result_fails_leaves_nothing_of_the_first(sim):
    x = torch.randn(100, device=sim.device)
    before_bytes = sim.allocated_bytes
    sim.fail_at(2)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        torch.var_mean(x)
    assert sim.allocated_bytes == before_bytes
    count = sim.n_allocations
    torch.var_mean(x)
    assert sim.n_allocations == count + 2


def test_a_caught_failure_holds_none_of_the_temporaries_of_the_failed_operation(sim):
    x = torch.ones(100, device=sim.device)
    before_bytes = sim.allocated_bytes
    sim.fail_at(3)
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        torch.var_mean(x + 1)
    assert caught.tb is not None
    assert sim.allocated_bytes == before_bytes


def test_a_failed_resize_of_an_out_argument_leaves_it_as_it_was(sim):
    x = torch.ones(100, device=sim.device)
    out = torch.empty(0, device=sim.device)
    sim.fail_at(1)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        torch.add(x, 1, out=out)
    assert out.shape == (0,)
    assert torch.add(x, 1, out=out).sum().item() == 200


def test_a_stream_from_before_a_fresh_start_may_be_recorded(sim):
    old = sim.module.Stream()
    sim()
    x = torch.zeros(1000, device=sim.device)
    x.record_stream(old)
    del x
    assert sim.module.memory_stats()["active_bytes.all.current"] == 0


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


def test_freeing_after_the_host_has_waited_is_clean(sim):
    side = sim.module.Stream()
    x = torch.zeros(1000, device=sim.device)
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        x.fill_(1)
    side.synchronize()
    del x
    assert sim.faults == []


def test_tensors_from_before_a_fresh_start_work_but_do_not_count(sim):
    x = torch.ones(100, device=sim.device)
    sim(budget=1000)
    assert sim.allocated_bytes == 0
    y = x + 1
    assert sim.allocated_bytes == 400
    del x
    assert sim.allocated_bytes == 400
    assert y.sum().item() == 200


def test_a_storage_dies_once_and_only_with_its_last_owner(sim):
    x = torch.zeros(10, device=sim.device)
    watched = weakref.ref(x)
    cycle = [x]
    cycle.append(cycle)
    del x, cycle
    assert sim.allocated_bytes == 40
    gc.collect()
    assert watched() is None
    assert sim.allocated_bytes == 0


def test_an_allocation_that_even_the_host_has_no_room_for_leaves_nothing(sim):
    with pytest.raises(torch.OutOfMemoryError, match="no memory that could stand for it"):
        torch.empty(1 << 58, device=sim.device)
    assert sim.allocated_bytes == sim.peak_bytes == sim.n_allocations == 0
    assert sim.n_ooms == 1


def test_a_budget_below_what_is_live_leaves_nothing_free(sim):
    x = torch.ones(100, device=sim.device)
    sim.budget_bytes = "0.25KiB"
    match = r"budget of 256 bytes of which 0 bytes is free; 400 bytes is allocated"
    with pytest.raises(torch.OutOfMemoryError, match=match):
        torch.ones(1, device=sim.device)
    assert sim.module.mem_get_info() == (0, 256)
    del x
    torch.ones(64, device=sim.device)
