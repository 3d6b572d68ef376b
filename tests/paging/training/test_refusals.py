"""What can't be exact is refused by name, and what fails leaves a model that trains on."""

import pytest
import torch
from torch import nn

from tenure.paging import PagingError, page
from tenure.profiler import MemReporter
from tests.threads import on_thread

from ..support import about_values
from .blocks import inputs

pytestmark = about_values


@pytest.fixture
def both(pair):
    return pair()


def goes_on(both, x):
    """Train a step, and compare."""
    both.host.zero_grad()
    both.there.zero_grad()
    both.train(x)


def test_transforms_of_torch_func_and_a_pass_after_the_end_of_paging_are_refused(sim, both):
    x = inputs(sim)[0]
    with both.page():
        with pytest.raises(PagingError, match=r"^Sequential is paged for training and was called"):
            torch.func.grad(lambda x: both.host(x).sum())(x)
        goes_on(both, x)
        loss = both.host(x).sum()
    with pytest.raises(PagingError, match=r"^A backward pass needs weights of a model that was un"):
        loss.backward()
    both.host(x.cpu()).sum().backward()


def test_a_parameter_that_can_not_be_paged_is_refused(sim):
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(2, 2, device=sim.device)
    model.none = nn.Parameter(torch.ones(0))
    with page(model, sim.device, training=True):
        model[0].register_forward_hook(lambda module, args, output: output + model.none.sum())
        with pytest.raises(PagingError, match=r"^'none' asks for gradients and can't be trained"):
            model(x)
        model.none.requires_grad_(False)
        model(x).sum().backward()
    assert model[0].weight.grad is not None
    assert model.none.grad is None


@pytest.mark.parametrize("where", ["node", "post"])
def test_a_pass_that_raises_lets_the_next_one_run(sim, both, where):
    x = inputs(sim)[0]

    def fail(*_):
        raise ZeroDivisionError

    with both.page():
        goes_on(both, x)
        hidden = both.host[:4](x.clone().requires_grad_())
        loss = both.host[4](hidden).sum()
        if where == "post":
            handle = both.host[4].weight.register_post_accumulate_grad_hook(fail)
        else:
            handle = hidden.register_hook(fail)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
        handle.remove()
        goes_on(both, x)
        on_thread(goes_on, both, x)
        with pytest.raises(RuntimeError):
            both.host(torch.ones(3, device=sim.device))
        goes_on(both, x)


def test_reports_name_the_memory_of_gradients_which_stays_the_same_and_whether_it_is_pinned(
    sim, both
):
    told = []
    with both.page() as handle:
        for _ in range(3):
            goes_on(both, inputs(sim)[0])
            told.append(handle.report())
            assert told[-1].pinned_bytes == told[-1].host_bytes == told[0].host_bytes
        assert 2 * both.weight_bytes <= told[0].host_bytes < 2.5 * both.weight_bytes
        report = MemReporter(both.host).report(verbose=False)
        assert report.categories["gradients"] >= both.weight_bytes
        both.host.zero_grad()
        report = MemReporter(both.host).report(verbose=False)
        assert report.categories["paged: gradients"] >= both.weight_bytes
    with both.page(host="pageable", activations="host") as handle:
        for _ in range(2):
            goes_on(both, inputs(sim)[0])
        assert handle.report().pinned_bytes == 0
