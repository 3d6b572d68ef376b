"""What can't be exact is refused by name, and what fails leaves a model that trains on."""

import threading

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, page
from tenure.profiler import MemReporter

from .blocks import WIDTH, inputs

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")


def goes_on(both, x):
    """Train a step, and compare."""
    both.host.zero_grad()
    both.there.zero_grad()
    both.run(lambda model: model(x).sum().backward())
    assert both.gradients_differ() == []


def test_transforms_of_torch_func_are_refused(sim, halved):
    x = inputs(sim)[0]
    with pytest.raises(
        PagingError, match=r"^Sequential is paged for training and was called insid"
    ):
        torch.func.grad(lambda x: halved.host(x).sum())(x)
    goes_on(halved, x)


def test_a_parameter_that_can_not_be_paged_is_refused(sim):
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.none = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(0))

        def forward(self, x):
            return self.linear(x) + self.none.sum()

    model, x = Empty(), torch.randn(2, WIDTH, device=sim.device)
    with page(model, sim.device, training=True):
        with pytest.raises(PagingError, match=r"^'none' asks for gradients and can't be trained"):
            model(x)
        model.none.requires_grad_(False)
        model(x).sum().backward()
    assert model.linear.weight.grad is not None
    assert model.none.grad is None


@pytest.mark.usefixtures("captures")
def test_a_graph_captures_neither_pass_of_training(sim, pair):
    both = pair()
    x = inputs(sim)[0]
    with both.page() as handle:
        goes_on(both, x)
        loss = both.host(x).sum()
        ones = torch.ones(4, device=sim.device)
        for work, name in [
            (lambda: both.host(x), "Sequential is paged and was called"),
            (lambda: loss.backward(retain_graph=True), "A backward pass needs weights that are"),
            (handle.unpage, "unpage() was called of <PagedModel"),
        ]:
            with sim.module.graph(sim.module.CUDAGraph()):
                ones.add_(1)
                with pytest.raises(PagingError, match="while a graph is captured") as caught:
                    work()
            assert str(caught.value).startswith(name)
        goes_on(both, x)


def test_a_backward_pass_after_the_end_of_paging_is_refused(sim, pair):
    both = pair()
    x = inputs(sim)[0]
    with both.page():
        loss = both.host(x).sum()
    with pytest.raises(
        PagingError, match=r"^A backward pass needs weights of a model that was unp"
    ):
        loss.backward()
    both.host(x.cpu()).sum().backward()


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["node", "post"])
def test_a_pass_that_raises_lets_the_next_one_run(sim, halved, where):
    x = inputs(sim)[0]
    goes_on(halved, x)

    def fail(*_):
        raise ZeroDivisionError

    hidden = halved.host[2](x.clone().requires_grad_())
    loss = halved.host[3](hidden).sum()
    weight = halved.host[2].up.weight
    if where == "post":
        handle = weight.register_post_accumulate_grad_hook(fail)
    else:
        handle = hidden.register_hook(fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
    handle.remove()
    goes_on(halved, x)
    thread = threading.Thread(target=goes_on, args=(halved, x))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError):
        halved.host(torch.ones(3, device=sim.device))
    goes_on(halved, x)


def test_pageable_host_memory(sim, pair):
    both = pair()
    with both.page(host="pageable", activations="host") as handle:
        for _ in range(2):
            goes_on(both, inputs(sim)[0])
        assert handle.report().pinned_bytes == 0


def test_reports_name_the_memory_of_gradients(sim, halved):
    goes_on(halved, inputs(sim)[0])
    report = MemReporter(halved.host).report(verbose=False)
    assert report.categories["gradients"] >= halved.weight_bytes
    halved.host.zero_grad()
    report = MemReporter(halved.host).report(verbose=False)
    assert report.categories["paged: gradients"] >= halved.weight_bytes
    told = halved.handle.report()
    assert told.pinned_bytes == told.host_bytes
    assert told.host_bytes >= 2 * halved.weight_bytes
