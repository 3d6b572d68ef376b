"""While a graph is captured: what is refused by name, what runs as it is, what is left alone."""

import gc

import pytest
import torch
from torch import nn

from tenure import adaptive
from tenure.adaptive import AdaptiveUsageError, memory_budget, statistics, step

from ..attempt.failures import on_sim

pytestmark = pytest.mark.usefixtures("forgetful", "captures")


@pytest.fixture
def graph(sim):
    sim(allocator="cuda", budget="64MiB")
    return sim.module.CUDAGraph()


def test_a_step_is_refused_by_name_and_the_capture_goes_on(sim, graph):
    model = nn.Linear(4, 1).to(sim.device)
    x = torch.ones(4, 4).to(sim.device)
    out = torch.zeros(4, 4).to(sim.device)
    with sim.module.graph(graph):
        with pytest.raises(AdaptiveUsageError, match=r"^step\(\) was called while a"):
            step(lambda batch: model(batch).mean(), x)
        torch.add(x, 1, out=out)
    graph.replay()
    assert out.cpu().tolist() == [[2.0] * 4] * 4
    assert model.weight.grad is None


def test_a_budget_is_refused_by_name_and_the_capture_goes_on(sim, graph):
    x = torch.ones(4).to(sim.device)
    with sim.module.graph(graph):
        budget = memory_budget("1MiB", "sim")
        with pytest.raises(AdaptiveUsageError, match=r"not yet open> was entered while a graph is"):
            budget.__enter__()
        with memory_budget("1MiB"):
            x.add_(1)
    graph.replay()
    assert x.cpu().tolist() == [2.0] * 4
    with budget:
        pass


def guarded(sim, function):
    def call(*args, **kwargs):
        assert not sim.module.is_current_stream_capturing()
        return function(*args, **kwargs)

    return call


def test_an_out_of_memory_error_goes_on_untouched_and_retries_work_after_the_capture(
    sim, graph, monkeypatch
):
    for name in ("synchronize", "empty_cache", "memory_snapshot"):
        monkeypatch.setattr(sim.module, name, guarded(sim, getattr(sim.module, name)))
    monkeypatch.setattr(gc, "collect", guarded(sim, gc.collect))
    f = adaptive.batch(initial_batchsize=64, restore_rng=True)(lambda size: on_sim(size * 2 << 20))
    statistics().reset()
    with sim.module.graph(graph):
        with pytest.raises(torch.OutOfMemoryError, match=r"^sim:0 out of memory") as caught:
            f()
        assert sim.module.is_current_stream_capturing()
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (statistics().attempts, statistics().retries, statistics().shrinks) == (1, 0, 0)
    assert adaptive.simple.batch(lambda size: on_sim(size << 20).numel(), 128) == 64 << 20
