import contextlib

import pytest
import torch

from tenure.testing import RaceError

FORBIDDEN = "CUDA error: operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"


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
    assert not sim.module.is_current_stream_capturing()
    with sim.module.graph(graph, stream=side):
        assert sim.module.is_current_stream_capturing()
        assert sim.module.current_stream() is side
        with sim.module.stream(sim.module.default_stream()):
            assert not sim.module.is_current_stream_capturing()
            x.add_(1)
    assert not sim.module.is_current_stream_capturing()
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


WAITS = {
    "device": lambda sim, before: sim.module.synchronize(),
    "stream": lambda sim, before: sim.module.current_stream().synchronize(),
    "other stream": lambda sim, before: sim.module.default_stream().synchronize(),
    "stream query": lambda sim, before: sim.module.current_stream().query(),
    "event": lambda sim, before: before.synchronize(),
    "event query": lambda sim, before: before.query(),
    "item": lambda sim, before: torch.ones(1, device=sim.device).item(),
    "nonzero": lambda sim, before: torch.ones(1, device=sim.device).nonzero(),
    "pinning": lambda sim, before: sim.module.cudart().cudaHostRegister(1, 1, 0),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_host_that_waits_breaks_the_capture(sim, wait):
    torch.ones(1, device=sim.device)
    before = sim.module.current_stream().record_event()
    with broken_capture(sim):
        with pytest.raises(torch.AcceleratorError, match=FORBIDDEN):
            WAITS[wait](sim, before)
        with pytest.raises(torch.AcceleratorError, match=BROKEN):
            torch.ones(1, device=sim.device).add_(1)
    sim.module.set_stream(sim.module.default_stream())
    assert torch.ones(1, device=sim.device).item() == 1


@pytest.mark.parametrize("direction", ["in", "out"])
def test_copies_between_host_and_device_are_refused_by_name(sim, direction):
    x, host = torch.zeros(4, device=sim.device), torch.ones(4).pin_memory()
    pair = (x, host) if direction == "in" else (host, x)
    with broken_capture(sim), pytest.raises(RuntimeError, match="captures no copies between host"):
        pair[0].copy_(pair[1], non_blocking=True)


def test_a_second_stream_is_refused_by_name(sim):
    side = sim.module.Stream()
    before = side.record_event()
    for call in (
        before.wait,
        lambda: side.wait_stream(sim.module.current_stream()),
        lambda: sim.module.current_stream().wait_stream(side),
    ):
        with broken_capture(sim), pytest.raises(RuntimeError, match="no events, and so no second"):
            call()


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


def test_running_out_of_memory_in_a_capture_leaves_it_whole(sim):
    x, graph = torch.zeros(4, device=sim.device), sim.module.CUDAGraph()
    sim.budget_bytes = 32
    with sim.module.graph(graph):
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([x, x, x])
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1] * 4


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
    assert not sim.module.is_current_stream_capturing()
    sim.module.synchronize()
