"""Kernels that run late: each kind of missing wait gives wrong numbers, and nothing else does."""

import re

import pytest
import torch

N = 64


@pytest.fixture
def late(sim):
    return sim(late_kernels=True, detect_races=False)


def pinned(value):
    return torch.full((N,), float(value)).pin_memory()


def on(sim, value):
    return torch.full((N,), float(value), device=sim.device)


def is_all(x, value):
    return x.cpu().eq(value).all().item()


def wait_for(sim, stream):
    sim.module.current_stream().wait_stream(stream)


@pytest.fixture
def side(late):
    made = late.module.Stream()
    made.wait_stream(late.module.current_stream())
    return made


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_that_does_not_wait_for_a_copy_reads_old_bytes(late, side, waits):
    x, source = on(late, 1), pinned(2)
    side.wait_stream(late.module.current_stream())
    with late.module.stream(side):
        x.copy_(source, non_blocking=True)
    if waits:
        wait_for(late, side)
    assert is_all(x * 10, 20 if waits else 10)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_overwritten_before_its_last_use_has_run_is_lost(late, side, waits):
    page, source = on(late, 1), pinned(2)
    late.module.synchronize()
    used = page * 10
    if waits:
        side.wait_stream(late.module.current_stream())
    with late.module.stream(side):
        page.copy_(source, non_blocking=True)
    assert is_all(used, 10 if waits else 20)
    side.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_refilled_before_it_was_written_back_is_lost(late, side, waits):
    slot, source, kept = on(late, 1), pinned(2), pinned(0)
    out, into = side, late.module.Stream()
    for stream in (out, into):
        stream.wait_stream(late.module.current_stream())
    with late.module.stream(out):
        kept.copy_(slot, non_blocking=True)
    if waits:
        into.wait_stream(out)
    with late.module.stream(into):
        slot.copy_(source, non_blocking=True)
    late.module.synchronize()
    assert is_all(kept, 1 if waits else 2)


@pytest.mark.parametrize("how", ["recorded", "waited", "neither"])
def test_what_is_freed_too_early_is_used_again(late, side, how):
    page = on(late, 1)
    side.wait_stream(late.module.current_stream())
    with late.module.stream(side):
        used = page * 10
    if how == "recorded":
        page.record_stream(side)
    if how == "waited":
        wait_for(late, side)
    del page
    other = on(late, 7)
    late.module.synchronize()
    assert is_all(used, 70 if how == "neither" else 10)
    assert is_all(other, 7)


@pytest.mark.parametrize("waits", [True, False])
def test_the_last_of_two_writes_is_the_one_that_waits(late, side, waits):
    x = on(late, 0)
    side.wait_stream(late.module.current_stream())
    x.fill_(1)
    if waits:
        side.wait_stream(late.module.current_stream())
    with late.module.stream(side):
        x.fill_(2)
    late.module.synchronize()
    assert is_all(x, 2 if waits else 1)


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_read_when_the_copy_runs(late, side, waits):
    source, x = pinned(1), on(late, 0)
    x.copy_(source, non_blocking=True)
    if waits:
        late.module.synchronize()
    source.fill_(5)
    assert is_all(x, 1 if waits else 5)


def test_pinned_memory_is_written_when_the_host_has_waited(late):
    x, target = on(late, 3), pinned(0)
    target.copy_(x, non_blocking=True)
    assert target.isnan().all()
    late.module.synchronize()
    assert is_all(target, 3)


def test_a_pinned_buffer_goes_out_and_comes_back_on_one_stream(late):
    buffer, x, y = pinned(1), on(late, 0), on(late, 0)
    x.copy_(buffer, non_blocking=True)
    x.mul_(3)
    buffer.copy_(x, non_blocking=True)
    y.copy_(buffer, non_blocking=True)
    assert is_all(x, 3)
    assert is_all(y, 3)


def test_an_event_that_was_recorded_too_early_does_not_help(late, side):
    x = on(late, 0)
    side.wait_stream(late.module.current_stream())
    early = late.module.current_stream().record_event()
    x.fill_(1)
    with late.module.stream(side):
        side.wait_event(early)
        read = x.clone()
    side.synchronize()
    with late.module.stream(side):
        assert is_all(read, 0)


def test_a_kernel_that_waits_for_nothing_has_not_run_when_another_stream_is_done(late, side):
    x = on(late, 0)
    late.module.synchronize()
    x.fill_(1)
    with late.module.stream(side):
        torch.ones(4, device=late.device).sum().item()
        assert is_all(x.clone(), 0)
    assert is_all(x, 1)


def test_work_of_one_stream_runs_in_its_order(late):
    x = on(late, 1)
    for factor in (2, 3, 5):
        x.mul_(factor)
        y = x + 1
        x = y * 2
    assert is_all(x, ((((1 * 2) + 1) * 2 * 3 + 1) * 2 * 5 + 1) * 2)


def test_what_the_host_learns_is_true(late, side):
    x = on(late, 0)
    late.module.synchronize()
    with late.module.stream(side):
        x[:3].fill_(1)
    assert x.nonzero().shape == (0, 1)
    assert x.sum().item() == 0
    assert not torch.equal(x, torch.ones_like(x))
    wait_for(late, side)
    assert x.nonzero().flatten().tolist() == [0, 1, 2]
    assert x.sum().item() == 3


def test_random_numbers_are_those_of_the_launch(late):
    late(detect_races=False)
    late.module.manual_seed(3)
    expected = torch.rand(N, device=late.device).cpu()
    late(late_kernels=True, detect_races=False)
    late.module.manual_seed(3)
    x = torch.rand(N, device=late.device)
    torch.rand(N, device=late.device)
    generator = torch.Generator().manual_seed(4)
    y = torch.rand(N, device=late.device, generator=generator)
    state = late.module.get_rng_state()
    x, y = x.cpu(), y.cpu()
    assert torch.equal(late.module.get_rng_state(), state)
    assert torch.equal(y, torch.rand(N, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(x, expected)


def test_a_number_of_the_host_is_taken_at_the_launch(late):
    factor = torch.tensor(2.0)
    x = on(late, 1) * factor
    factor.fill_(100)
    assert is_all(x, 2)


def test_training_is_as_without_late_kernels(sim):
    def train(late_kernels):
        sim(late_kernels=late_kernels)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(),
            torch.nn.Linear(16, 2),
        ).to(sim.device)
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(3):
            x = torch.randn(4, 8).pin_memory().to(sim.device, non_blocking=True)
            loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 1, 0]).to("sim"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


def test_a_kernel_that_fails_over_bytes_that_are_not_there_is_a_fault(late, side):
    table = on(late, 1)
    index = torch.full((4,), 1 << 40, device=late.device)
    late.module.synchronize()
    with late.module.stream(side):
        index.fill_(0)
    picked = table[index]
    assert picked.isnan().all()
    (fault,) = late.take_faults()
    assert re.match(r"late kernel: aten\.index\.\w+ failed when it ran: index 1099511627776", fault)
    side.synchronize()


def test_a_result_that_outgrows_its_memory_is_true(late):
    x = torch.empty(2, device=late.device)
    torch.add(on(late, 1), 1, out=x.resize_(0))
    assert is_all(x, 2)


def test_storage_that_was_emptied_and_filled_again_starts_anew(late):
    x = on(late, 1)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(4 * N)
    x.fill_(3)
    assert is_all(x, 3)


def test_copies_to_another_type_and_back_are_true(late):
    x = on(late, 1.5)
    assert x.to(torch.float16).to("cpu").eq(1.5).all()
    assert x[::2].cpu().eq(1.5).all()
    assert torch.full((N,), 2.5).to(late.device, torch.float64).cpu().eq(2.5).all()


def test_tensors_of_an_earlier_start_keep_their_values(sim):
    x = on(sim, 2)
    sim(late_kernels=True)
    x.mul_(2)
    assert is_all(x, 4)
    sim()
    assert is_all(x, 4)


def test_a_replay_is_true(late):
    x, graph = on(late, 1), late.module.CUDAGraph()
    with late.module.graph(graph):
        x.mul_(2)
    x.add_(1)
    graph.replay()
    x.add_(1)
    assert is_all(x, 5)


def test_modes_of_the_program_do_not_see_what_runs_late(late):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    x = on(late, 1) * 2
    with Counting(), torch.inference_mode():
        late.module.synchronize()
        x.add_(1)
    assert seen == ["aten.add_.Tensor"]
    assert is_all(x, 3)


@pytest.mark.exhaustive
def test_a_host_that_runs_far_ahead_is_held_up(late):
    x = on(late, 0)
    for _ in range(1500):
        x.add_(1)
    assert is_all(x, 1500)
