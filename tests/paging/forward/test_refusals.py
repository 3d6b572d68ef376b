"""Graphs that are captured around or inside a paged model: refused by name, and none is broken."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.paging import PagingError, chunk, load_paged, page, plan_paging
from tests.shrinking import ask_to_shrink

from ..models import WIDTH, mlp

pytestmark = pytest.mark.usefixtures("without_gradients", "captures")
BUDGETS = ["12KiB", "1MiB"]  # units pass; all stay


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

    def elsewhere(function, *args):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args).result()

    return inside if request.param == "this thread" else partial(inside, elsewhere)


def refused(function, *args, **kwargs):
    with pytest.raises(PagingError, match=r"while a graph is captured\. .* Nothing was done") as it:
        function(*args, **kwargs)
    return str(it.value)


@pytest.mark.parametrize("budget", BUDGETS)
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


def test_the_call_of_a_method_is_refused(sim, inside, x):
    class Described(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def describe(self):
            return self.weight.sum()

    model = Described()
    with page(model, sim.device, methods=("describe",)):
        assert "Described is paged and was called" in inside(refused, model.describe)
        assert model.describe().item() == WIDTH


def test_what_pages_a_model_is_refused(sim, model, x, inside, tmp_path):
    expected = model(x)
    inside(refused, page, model, sim.device)
    inside(refused, page, model, sim.device, host=tmp_path)
    inside(refused, chunk, model, sim.device)
    inside(refused, plan_paging, model, sim.device)
    inside(refused, load_paged, model, tmp_path, sim.device)
    assert torch.equal(model(x), expected)


def test_a_report_and_an_end_are_refused(sim, model, x, beside):
    with page(model, sim.device, budget="12KiB") as handle:
        expected = model(x)
        assert "report() was called of <PagedModel" in beside(refused, handle.report)
        assert "unpage() was called of <PagedModel" in beside(refused, handle.unpage)
        assert not handle.closed
        assert torch.equal(model(x), expected)
    beside(handle.unpage)  # nothing, the second time


@pytest.mark.parametrize("budget", BUDGETS)
def test_nothing_is_given_back(sim, model, x, beside, budget):
    with page(model, sim.device, budget=budget):
        expected = model(x)
        assert beside(ask_to_shrink, "sim", 1) == 0
        assert torch.equal(model(x), expected)


def test_a_weight_is_not_read_outside_of_the_forward(sim, model, x, inside):
    with page(model, sim.device, budget="12KiB"):
        model(x)
        assert "'0.weight' is paged and was read" in inside(refused, lambda: model[0].weight)


class Capturing(nn.Module):
    """Captures what its weights do, in its own forward."""

    def __init__(self, module):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.module = (module,)
        self.says = []

    def forward(self, x):
        (module,) = self.module
        for read in (lambda: F.linear(x, self.weight), lambda: self.inner(x)):
            with module.graph(module.CUDAGraph()):
                self.says.append(refused(read))
        return self.inner(F.linear(x, self.weight))


@pytest.mark.parametrize("budget", ["9KiB", "1MiB"])
def test_a_forward_captures_none_of_its_weights(sim, inside, x, budget):
    model = Capturing(sim.module).eval()
    expected = copy.deepcopy(model.inner)(x.sum(1, keepdim=True).expand(-1, WIDTH))
    with page(model, sim.device, budget=budget):
        for _ in range(2):
            torch.testing.assert_close(model(x).cpu(), expected)
    assert {each.split(" while")[0] for each in model.says} == {
        "'weight' is paged and was read",
        "Linear is paged and was called",
    }


def test_garbage_is_given_back_when_the_capture_is_over(sim, x, beside):
    def make():
        model = mlp().eval()
        model.itself = [model]
        page(model, sim.device)
        model(x)

    make()
    before_bytes = sim.allocated_bytes
    assert before_bytes > 0
    beside(gc.collect)
    make()
    gc.collect()
    assert sim.allocated_bytes == 0


def test_a_capture_on_the_device_of_the_model_counts_wherever_the_call_is_made(sim, x):
    sim(devices=2)
    model = mlp().eval()
    with page(model, "sim:1"):
        expected = model(x)
        there, graph, here = sim.module.device(1), sim.module.CUDAGraph(), sim.module.device(0)
        with there, sim.module.graph(graph), here:
            refused(model, x)
        assert torch.equal(model(x), expected)


def test_the_class_of_graphs_is_as_before_when_no_model_is_paged(sim, model):
    def verbs():
        return [vars(sim.module.CUDAGraph).get(name) for name in ("capture_begin", "capture_end")]

    before = verbs()
    with page(model, sim.device):
        assert verbs() != before
    gc.collect()
    assert verbs() == before
    graph = sim.module.CUDAGraph()
    with page(model, sim.device) as handle:
        with pytest.raises(RuntimeError, match="non-default stream"):
            graph.capture_begin()
        # What could not begin is no capture.
        handle.unpage()
