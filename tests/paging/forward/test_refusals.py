"""Graphs that are captured around or inside a paged model: refused by name, and none is broken."""

import copy
from functools import partial

import pytest
import torch

from tenure.paging import PagingError, chunk, load_paged, page, plan_paging
from tests.shrinking import ask_to_shrink
from tests.threads import on_thread

pytestmark = pytest.mark.usefixtures("without_gradients", "captures")


@pytest.fixture
def inside(sim):
    """A capture, which must come to its end."""

    def capture(function, *args, **kwargs):
        graph, ones = sim.module.CUDAGraph(), torch.ones(4, device=sim.device)
        with sim.module.graph(graph):
            ones.add_(1)
            result = function(*args, **kwargs)
        graph.replay()
        assert ones.tolist() == [2] * 4
        return result

    return capture


@pytest.fixture(params=["this thread", "another thread"])
def beside(request, inside):
    """A capture, and a call on its thread or on another one, which is on the default stream."""

    return inside if request.param == "this thread" else partial(inside, on_thread)


def refused(function, *args, **kwargs):
    with pytest.raises(PagingError, match=r"while a graph is captured\. .* Nothing was done") as it:
        function(*args, **kwargs)
    return str(it.value)


@pytest.mark.parametrize("budget", ["12KiB", "1MiB"])  # units pass; all stay
def test_a_call_is_refused_and_the_model_works_after_it(sim, model, x, inside, budget):
    x = x.to(sim.device)
    expected = copy.deepcopy(model).to(sim.device)(x)
    with page(model, sim.device, budget=budget) as handle:
        for _ in range(2):
            assert torch.equal(model(x), expected)
            passes = handle.report().passes
            message = inside(refused, model, x)
            assert message.startswith("Sequential is paged and was called while a graph is")
            assert handle.report().passes == passes
        assert torch.equal(model(x), expected)


def test_what_pages_a_model_is_refused(sim, model, x, inside, tmp_path):
    expected = model(x)
    for verb in (page, chunk, plan_paging):
        inside(refused, verb, model, sim.device)
    inside(refused, page, model, sim.device, host=tmp_path)
    inside(refused, load_paged, model, tmp_path, sim.device)
    assert torch.equal(model(x), expected)


def test_a_report_an_end_and_a_read_are_refused_and_nothing_is_given_back(
    sim, model, x, inside, beside
):
    with page(model, sim.device, budget="12KiB") as handle:
        expected = model(x)
        assert "report() was called of <PagedModel" in beside(refused, handle.report)
        assert "unpage() was called of <PagedModel" in beside(refused, handle.unpage)
        assert "'0.weight' is paged and was read" in inside(refused, lambda: model[0].weight)
        assert beside(ask_to_shrink, "sim", 1) == 0
        assert not handle.closed
        assert torch.equal(model(x), expected)
    beside(handle.unpage)  # nothing, the second time


def test_neither_pass_of_training_is_captured(sim, pair, x, inside):
    both, x = pair(), x.to(sim.device)
    with torch.enable_grad(), both.page():
        both.train(x)
        loss = both.host(x).sum()
        assert inside(refused, both.host, x).startswith("Sequential is paged and was called")
        told = inside(refused, loss.backward, retain_graph=True)
        assert told.startswith("A backward pass needs weights that are")
        both.train(x)
