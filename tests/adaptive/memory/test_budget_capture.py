"""While a graph is captured: what is refused by name, what runs as it is, what is left alone."""

import gc

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure.adaptive import (
    AdaptiveUsageError,
    OutOfRetriesError,
    check_split,
    memory_budget,
    statistics,
    step,
)

from ..attempt.failures import on_sim

pytestmark = pytest.mark.usefixtures("forgetful", "captures")


@pytest.fixture
def graph(sim):
    sim(allocator="cuda", budget="64MiB")
    return sim.module.CUDAGraph()


def capturing(sim, graph):
    return sim.module.graph(graph)


@pytest.mark.parametrize("call", [step, check_split])
def test_a_step_is_refused_by_name_and_the_capture_goes_on(sim, graph, call):
    model = nn.Linear(4, 1).to(sim.device)
    x = torch.ones(4, 4).to(sim.device)
    out = torch.zeros(4, 4).to(sim.device)
    with capturing(sim, graph):
        with pytest.raises(AdaptiveUsageError, match=rf"^{call.__name__}\(\) was called while a"):
            call(lambda batch: model(batch).mean(), x)
        torch.add(x, 1, out=out)
    graph.replay()
    assert out.cpu().tolist() == [[2.0] * 4] * 4
    assert model.weight.grad is None


def test_a_budget_is_refused_by_name_and_the_capture_goes_on(sim, graph):
    x = torch.ones(4).to(sim.device)
    with capturing(sim, graph):
        budget = memory_budget("1MiB", "sim")
        with pytest.raises(AdaptiveUsageError, match=r"not yet open> was entered while a graph is"):
            budget.__enter__()
        with memory_budget("1MiB"):
            x.add_(1)
    graph.replay()
    assert x.cpu().tolist() == [2.0] * 4
    with budget:
        pass


def test_a_budget_may_be_open_around_a_capture_and_counts_it(sim, graph):
    with memory_budget("4MiB", "sim") as budget:
        with capturing(sim, graph):
            kept = on_sim(1 << 20)
        assert budget.live_bytes == 1 << 20
        graph.replay()
    del kept


@pytest.mark.parametrize("restore_rng", [False, True])
def test_a_function_that_fits_is_captured_as_it_is(sim, graph, restore_rng):
    x, sums = torch.ones(6).to(sim.device), torch.zeros(6).to(sim.device)

    @adaptive.chunked(initial_step=4, restore_rng=restore_rng)
    def f(chunk, start, end):
        torch.add(chunk, 1, out=sums[start:end])

    with capturing(sim, graph):
        f(x)
    graph.replay()
    assert sums.cpu().tolist() == [2.0] * 6


def out_of_memory(sim):
    """The error that a function of 128 MiB raises during a capture, through an adaptive call."""

    @adaptive.batch(initial_batchsize=64, restore_rng=True)
    def f(size):
        on_sim(size * 2 << 20)

    with capturing(sim, sim.module.CUDAGraph()):
        with pytest.raises(torch.OutOfMemoryError, match=r"^sim:0 out of memory") as caught:
            f()
        assert sim.module.is_current_stream_capturing()
    return caught.value


def test_an_out_of_memory_error_goes_on_untouched_and_nothing_is_tried(sim, graph, monkeypatch):
    for name in ("synchronize", "empty_cache", "memory_snapshot"):
        monkeypatch.setattr(sim.module, name, guarded(sim, getattr(sim.module, name)))
    monkeypatch.setattr(gc, "collect", guarded(sim, gc.collect))
    statistics().reset()
    error = out_of_memory(sim)
    assert error.__cause__ is None
    assert error.__context__ is None
    assert (statistics().attempts, statistics().retries, statistics().shrinks) == (1, 0, 0)


def guarded(sim, function):
    def call(*args, **kwargs):
        assert not sim.module.is_current_stream_capturing()
        return function(*args, **kwargs)

    return call


def test_a_capture_that_an_attempt_left_open_hides_no_error(sim, graph, monkeypatch):
    def refused(*args):
        raise RuntimeError("CUDAGeneratorImpl::set_current_seed can be called during")

    @adaptive.batch(initial_batchsize=2, restore_rng=True)
    def work(size):
        monkeypatch.setattr(sim.module, "set_rng_state", refused)
        graph.capture_begin()
        on_sim(1 << 30)

    with sim.module.stream(sim.module.Stream()):
        with pytest.raises(torch.OutOfMemoryError):
            work()
        graph.capture_end()


def test_a_capture_inside_the_work_is_tried_again_with_it(sim, graph):
    sizes = []

    @adaptive.batch(initial_batchsize=64)
    def f(size):
        sizes.append(size)
        graph = sim.module.CUDAGraph()
        with capturing(sim, graph):
            made = on_sim(size * 2 << 20)
            made.fill_(size)
        graph.replay()
        return int(made[0].cpu())

    assert f() == sizes[-1] <= 32 < sizes[0]


def test_the_retries_work_again_after_the_capture(sim, graph):
    out_of_memory(sim)
    with pytest.raises(OutOfRetriesError):
        adaptive.simple.batch(lambda size: on_sim(128 << 20), 2)
    assert adaptive.simple.batch(lambda size: on_sim(size << 20).numel(), 128) == 64 << 20
