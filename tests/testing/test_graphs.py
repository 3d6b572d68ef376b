import contextlib

import pytest
import torch

from tenure._graph_capture import is_capturing
from tenure.testing import RaceError

FORBIDDEN = "CUDA error: operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"
ISOLATED = "CUDA error: dependency created on uncaptured work in another stream"
CAPTURED = "CUDA error: operation not permitted on an event last recorded in a capturing stream"


@contextlib.contextmanager
def broken_capture(sim):
    """A capture whose end says that a call in it was forbidden."""
    graph = sim.module.CUDAGraph()
    with pytest.raises(torch.AcceleratorError, match=BROKEN), sim.module.graph(graph):
        yield
    with pytest.raises(RuntimeError, match="replay without a preceding successful capture"):
        graph.replay()


@pytest.mark.exhaustive
def test_captured_work_runs_at_each_replay_and_not_before(sim):
    x, total = torch.ones(4, device=sim.device), torch.zeros(4, device=sim.device)
    graph = sim.module.CUDAGraph()
    with sim.module.graph(graph):
        y = (x * 2).exp_()
        total.add_(y)
    assert total.tolist() == [0] * 4
    assert y.isnan().all()
    for n_replays in (1, 2):
        x.fill_(n_replays)
        graph.replay()
        torch.testing.assert_close(y.cpu(), torch.full((4,), 2.0 * n_replays).exp())
    torch.testing.assert_close(total.cpu(), torch.tensor([2.0, 2.0, 2.0, 2.0]).exp() + y.cpu())


def test_only_the_stream_of_the_capture_captures(sim):
    graph, side = sim.module.CUDAGraph(), sim.module.Stream()
    x = torch.zeros(4, device=sim.device)
    assert not is_capturing(sim.device)
    with sim.module.graph(graph, stream=side):
        assert is_capturing(sim.device)
        assert sim.module.current_stream() is side
        with sim.module.stream(sim.module.default_stream()):
            assert not is_capturing(sim.device)
            x.add_(1)
    assert not is_capturing(sim.device)
    assert x.tolist() == [1] * 4


def test_a_backward_pass_is_captured(sim):
    weight = torch.ones(4, device=sim.device, requires_grad=True)
    weight.grad = torch.zeros(4, device=sim.device)
    graph = sim.module.CUDAGraph()
    with sim.module.graph(graph):
        (weight * 3).sum().backward()
    assert weight.grad.tolist() == [0] * 4
    graph.replay()
    assert weight.grad.tolist() == [3] * 4


def test_random_numbers_are_drawn_at_each_replay(sim):
    graph = sim.module.CUDAGraph()
    before = sim.module.get_rng_state()
    with sim.module.graph(graph):
        x = torch.rand(4, device=sim.device)
        assert torch.equal(sim.module.get_rng_state(), before)
        sim.module.set_rng_state(before)
    graph.replay()
    first = x.tolist()
    graph.replay()
    assert x.tolist() != first
    sim.module.set_rng_state(before)
    assert torch.rand(4, device=sim.device).tolist() == first


def test_pinned_copies_are_captured(sim):
    inputs, outputs = torch.zeros(4).pin_memory(), torch.zeros(4).pin_memory()
    graph = sim.module.CUDAGraph()
    with sim.module.graph(graph):
        x = torch.empty(4, device=sim.device)
        x.copy_(inputs, non_blocking=True)
        outputs.copy_(x * 2, non_blocking=True)
    inputs.fill_(5)
    graph.replay()
    assert outputs.isnan().all()
    sim.module.synchronize()
    assert outputs.tolist() == [10] * 4
    assert sim.copied_bytes("h2d") == sim.copied_bytes("d2h") == 16


WAITS = {
    "device": lambda sim, before: sim.module.synchronize(),
    "stream": lambda sim, before: sim.module.current_stream().synchronize(),
    "other stream": lambda sim, before: sim.module.default_stream().synchronize(),
    "stream query": lambda sim, before: sim.module.current_stream().query(),
    "event": lambda sim, before: before.synchronize(),
    "event query": lambda sim, before: before.query(),
    "item": lambda sim, before: torch.ones(1, device=sim.device).item(),
    "nonzero": lambda sim, before: torch.ones(1, device=sim.device).nonzero(),
    "blocking copy": lambda sim, before: torch.ones(1, device=sim.device).copy_(PINNED[0]),
}
PINNED = []


@pytest.mark.parametrize("wait", WAITS)
def test_a_host_that_waits_breaks_the_capture(sim, wait):
    PINNED[:] = [torch.ones(1).pin_memory()]
    torch.ones(1, device=sim.device)
    before = sim.module.current_stream().record_event()
    with broken_capture(sim):
        with pytest.raises(torch.AcceleratorError, match=FORBIDDEN):
            WAITS[wait](sim, before)
        with pytest.raises(torch.AcceleratorError, match=BROKEN):
            torch.ones(1, device=sim.device).add_(1)
    sim.module.set_stream(sim.module.default_stream())
    assert torch.ones(1, device=sim.device).item() == 1


def test_waiting_for_an_event_from_outside_breaks_the_capture(sim):
    side = sim.module.Stream()
    before = side.record_event()
    for wait in (before.wait, lambda: sim.module.current_stream().wait_stream(side)):
        with broken_capture(sim), pytest.raises(torch.AcceleratorError, match=ISOLATED):
            wait()


def test_an_event_of_a_capture_is_of_no_use_outside(sim):
    graph, x = sim.module.CUDAGraph(), torch.ones(4, device=sim.device)
    with sim.module.graph(graph):
        x.add_(1)
        inside = sim.module.current_stream().record_event()
    uses = inside.query, inside.synchronize, inside.wait, sim.module.Stream().wait_event
    for use in (*uses[:3], lambda: uses[3](inside)):
        with pytest.raises(torch.AcceleratorError, match=CAPTURED):
            use()
    inside.record()
    inside.synchronize()


def test_asking_for_an_event_of_the_capture_breaks_it(sim):
    with broken_capture(sim):
        inside = sim.module.current_stream().record_event()
        with pytest.raises(torch.AcceleratorError, match=CAPTURED):
            inside.query()


def test_a_stream_that_waits_for_the_capture_joins_it_and_must_come_back(sim):
    graph, side = sim.module.CUDAGraph(), sim.module.Stream()
    x = torch.zeros(4, device=sim.device)

    def fork():
        side.wait_stream(sim.module.current_stream())
        with sim.module.stream(side):
            assert is_capturing(sim.device)
            x.add_(1)

    with sim.module.graph(graph):
        fork()
        sim.module.current_stream().wait_stream(side)
    assert x.tolist() == [0] * 4
    graph.replay()
    assert x.tolist() == [1] * 4
    unjoined = sim.module.graph(sim.module.CUDAGraph())
    with (
        pytest.raises(torch.AcceleratorError, match="capturing stream has unjoined work"),
        unjoined,
    ):
        fork()


def test_the_cache_is_not_emptied_and_nothing_is_seeded_in_a_capture(sim):
    graph = sim.module.CUDAGraph()
    sim.module.manual_seed(0)
    with sim.module.graph(graph):
        with pytest.raises(RuntimeError, match=r"!is_capture_context\(\) INTERNAL ASSERT FAILED"):
            sim.module.empty_cache()
        with pytest.raises(RuntimeError, match="only if new seed is the same as the original seed"):
            sim.module.manual_seed(1)
        with pytest.raises(RuntimeError, match="only if new seed is the same as the original seed"):
            sim.module.set_rng_state(torch.Generator().manual_seed(1).get_state())
    graph.replay()


@pytest.mark.parametrize("host", ["source", "destination"])
def test_pageable_memory_is_refused_in_a_capture_that_goes_on(sim, host):
    graph, x, plain = sim.module.CUDAGraph(), torch.zeros(4, device=sim.device), torch.ones(4)
    match = r"Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU ten"
    with sim.module.graph(graph), pytest.raises(RuntimeError, match=match):
        x.copy_(plain, non_blocking=True) if host == "source" else plain.copy_(x)
    graph.replay()


def test_pinning_in_place_is_refused_in_a_capture_and_leaves_its_error(sim):
    x, host = torch.zeros(4, device=sim.device), torch.zeros(4)
    with broken_capture(sim):
        assert sim.module.cudart().cudaHostRegister(host.data_ptr(), 16, 0) == 900
    sim.module.set_stream(sim.module.default_stream())
    with pytest.raises(torch.AcceleratorError, match=FORBIDDEN):
        x.add_(1)


def test_running_out_of_memory_in_a_capture_leaves_it_whole(sim):
    x, graph = torch.zeros(4, device=sim.device), sim.module.CUDAGraph()
    sim.budget_bytes = 32
    with sim.module.graph(graph):
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([x, x, x])
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1] * 4


def test_a_replay_after_its_memory_was_freed_is_caught(sim):
    weight, x = torch.ones(4, device=sim.device), torch.ones(4, device=sim.device)
    graph = sim.module.CUDAGraph()
    with sim.module.graph(graph):
        x.mul_(weight)
    graph.replay()
    del weight
    with pytest.raises(RaceError, match="graph replay after free: the graph uses bytes 0 to 16"):
        graph.replay()
    assert len(sim.take_faults()) == 1


def test_what_a_graph_has_made_outlives_its_tensors(sim):
    x, graph = torch.ones(4, device=sim.device), sim.module.CUDAGraph()
    with sim.module.graph(graph):
        x.copy_(x * 2 + 1)
    graph.replay()
    assert x.tolist() == [3] * 4


def test_a_replay_is_ordered_like_any_launch(sim):
    x, graph, side = torch.ones(4, device=sim.device), sim.module.CUDAGraph(), sim.module.Stream()
    with sim.module.graph(graph):
        x.mul_(2)
    x.add_(1)
    with sim.module.stream(side), pytest.raises(RaceError, match="graph replay after aten::add"):
        graph.replay()
    sim.take_faults()
    side.wait_stream(sim.module.current_stream())


def test_a_graph_is_captured_once_and_on_a_stream_of_its_own(sim):
    graph = sim.module.CUDAGraph()
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    with sim.module.graph(graph):
        pass
    again = sim.module.graph(graph)
    with pytest.raises(RuntimeError, match="already owns a captured graph"), again:
        pass


def test_a_fresh_start_ends_a_capture(sim):
    sim.module.graph(sim.module.CUDAGraph()).__enter__()
    sim()
    assert not is_capturing(sim.device)
    sim.module.synchronize()
