"""The handle: its report, its block, its calls, and giving memory back."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tenure.paging import PagingBudget, PagingError, chunk, page
from tenure.testing import Rates
from tests.shrinking import Shrinkable, ask_to_shrink

from .models import linears, mlp

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def model():
    return linears(8, 256, bias=False)


SLOW = Rates(h2d_bytes_per_s=1e9, copy_latency_s=0.0, host_copy_s=0.0)


def test_a_report_sets_a_pass_against_the_limit(sim, model):
    sim(rates=SLOW)
    x = torch.zeros(1, 256, device=sim.device)
    with page(model, sim.device, "256KiB", budget="1MiB") as handle:
        for _ in range(3):
            model(x)
        sim.module.synchronize()
        report = handle.report()
        assert str(report) == (
            "pass 3: 1.573 ms, 100.0% of the limit, bound by the link\n"
            "  moved      1.5 MiB at 1.0 GB/s, 0 faults (6 in all passes)\n"
            "  computed   0.032 ms, waited 1.541 ms\n"
            "  device     512.0 KiB stay, 512.0 KiB to pass through\n"
            "  takes      1.0 MiB, in 2.0 MiB that the allocator reserves\n"
            "  host       2.0 MiB\n"
            "  a budget of 2.0 MiB would hide the copies"
        )
    assert report.staging_bytes == 0


def test_a_pass_that_computes_for_long_is_bound_by_computation(sim, model):
    sim(rates=Rates(flops_per_s=1e9))
    with page(model, sim.device, "256KiB", budget="1MiB") as handle:
        for _ in range(3):
            model(torch.zeros(4, 256, device=sim.device))
        report = handle.report()
    assert report.bound == "compute"
    assert report.share_of_limit > 0.99
    assert report.helpful_budget_bytes is None


def test_there_is_no_report_before_the_first_pass_nor_after_the_last(sim, model):
    handle = page(model, sim.device)
    with pytest.raises(PagingError, match=r"^There is nothing to report yet: call the model first"):
        handle.report()
    handle.unpage()
    told = r"^<PagedModel Sequential on sim:0, unpaged> has nothing"
    with pytest.raises(PagingError, match=told):
        handle.report()
    with pytest.raises(PagingError, match="was entered, but it is unpaged"), handle:
        pass


def test_memory_is_given_back_when_it_is_short_elsewhere(sim, model):
    x = torch.randn(2, 256)
    with page(model, sim.device, "256KiB", budget="1536KiB") as handle:
        assert isinstance(handle._pager, Shrinkable)
        expected = model(x).cpu()
        before_bytes = sim.allocated_bytes
        assert ask_to_shrink("cuda", 1000) == 0
        assert ask_to_shrink("sim", 1000) == 256 * 1024
        assert sim.allocated_bytes == before_bytes - 256 * 1024
        assert repr(handle) == "<PagedModel Sequential on sim:0, 1.2 MiB in use>"
        assert ask_to_shrink(None, None) > 0
        while ask_to_shrink("sim:0", 1 << 20):
            pass
        assert sim.allocated_bytes == handle.report().ring_bytes
        assert torch.equal(model(x).cpu(), expected)
    assert ask_to_shrink("sim:0", 1) == 0


def test_pageable_memory_is_asked_for_without_a_warning(sim, model):
    with page(model, sim.device, budget="1MiB"):
        assert model[0].weight.is_pinned()
        # also once it was given other memory, if its own is kept
        kept = model[0].weight.data
        model[0].weight.data = kept * 2
        model(torch.ones(1, 256))
        assert model[0].weight.is_pinned()
    sim(fail_pinning="all")  # pinning would warn
    with page(model, sim.device, budget="1MiB", host="pageable"):
        model(torch.randn(2, 256))
        assert not model[0].weight.is_pinned()


@pytest.mark.parametrize("run", [page, chunk])
def test_a_model_of_one_layer_and_one_without_weights_can_be_paged_and_its_handle_called(sim, run):
    x = torch.ones(1, 32)
    for model in (nn.Linear(32, 32), nn.ReLU(), nn.Sequential(), mlp()[0]):
        expected = model(x)
        with run(model.eval(), torch.device("sim")) as handle:
            for found in (model(x), model(x.to(sim.device)), handle(x)):
                assert found.device == sim.device
                torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_handles_and_budgets_are_neither_pickled_nor_copied(sim, model, copied):
    budget = PagingBudget("1MiB")
    with page(model, sim.device, budget=budget) as handle:
        with pytest.raises(PagingError, match=r"^<PagedModel Seq.*Pickle or copy its model"):
            copied(handle)
        with pytest.raises(PagingError, match=r"^<PagingBudget 1.0 MiB.*> can't be pickled"):
            copied(budget)
        assert len(list(copy.deepcopy(handle.model).parameters())) == len(list(model.parameters()))
