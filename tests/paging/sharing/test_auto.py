"""budget="auto": all that is free, given back before it is missed, on the simulated device."""

import copy

import pytest
import torch
from torch import nn

from tenure.paging import PagingBudget, page, plan_paging

from .test_budget import FINE, WIDTH, Paged, linears

pytestmark = pytest.mark.usefixtures("without_gradients")
# Memory of a few hundred KiB is less than a segment of CUDA's allocator.
exact = pytest.mark.sim_allocator("exact")
MEMORY = 2**19


def run(sim, paged, n_passes):
    """What stays after each of some passes."""
    found = []
    for _ in range(n_passes):
        paged.run()
        found.append(paged.resident_bytes)
    return found


@exact
def test_it_begins_with_a_part_and_takes_what_computation_leaves(sim):
    sim(budget=MEMORY)
    model = linears(40)
    inputs = torch.empty(4, WIDTH, device=sim.device)
    plan = plan_paging(model, sim.device, budget="auto", **FINE)
    del inputs
    paged = Paged(sim, model, "auto")
    assert paged.handle.plan == plan
    assert plan.allocated_bytes <= 3 * MEMORY // 4
    found = run(sim, paged, 12)
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1 * MEMORY
    assert MEMORY // 32 <= MEMORY - sim.peak_bytes <= MEMORY // 8
    assert sim.n_ooms == 0
    assert paged.handle.plan == plan
    paged.handle.unpage()


@exact
def test_what_another_process_takes_is_given_back_and_taken_again_when_it_is_gone(sim):
    sim(budget=MEMORY)
    paged = Paged(sim, linears(40), "auto")
    whole = run(sim, paged, 12)[-1]
    for _ in range(4):
        sim.budget_bytes = sim.allocated_bytes + 2048  # what was free, but for a little
        run(sim, paged, 2)
    least = paged.resident_bytes
    assert least < whole - 2 * MEMORY // 32
    sim.budget_bytes = MEMORY
    found = run(sim, paged, 20)
    assert found == sorted(found)
    assert found[2] == least
    assert found[-1] == pytest.approx(whole, rel=0.05)
    assert sim.n_ooms == 0
    paged.handle.unpage()


class Keeping(nn.Module):
    """Layers whose outputs are all kept to the end of the pass."""

    def __init__(self, n_layers):
        super().__init__()
        self.layers = linears(n_layers)

    def forward(self, x):
        kept = [x]
        for layer in self.layers:
            kept.append(torch.tanh(layer(kept[-1])))
        return kept[-1]


@exact
def test_weights_go_within_a_pass_before_memory_runs_out(sim):
    sim(budget=MEMORY)
    model = Keeping(40)
    x = torch.randn(25, WIDTH)
    expected = copy.deepcopy(model)(x)
    with page(model, sim.device, budget="auto", **FINE) as handle:
        before_bytes = handle._engine.room.resident_bytes
        x = x.to(sim.device)
        # more than is left beside the weights, and little at a time
        assert 40 * x.nbytes > MEMORY - sim.allocated_bytes
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
        assert handle._engine.room.resident_bytes < before_bytes
    assert sim.n_ooms == 0


@exact
def test_models_that_follow_what_is_free_share_it(sim):
    sim(budget=MEMORY)
    first = Paged(sim, linears(20), "auto")
    second = Paged(sim, linears(22, seed=1), "auto")
    for _ in range(3):
        first.run(4)
        second.run(4)
    assert second.resident_bytes > 0.5 * MEMORY
    assert sim.n_ooms == 0
    second.handle.unpage()
    run(sim, first, 12)
    assert first.handle.report().bytes_per_pass == 0
    first.handle.unpage()


def test_on_the_host_it_follows_what_the_machine_has_free(monkeypatch, tmp_path):
    model, x = linears(12), torch.ones(2, WIDTH)
    expected = model(x)
    free = {"bytes": 400_000}
    monkeypatch.setattr("tenure.paging._budget.free_host_bytes", lambda: free["bytes"])
    with page(model, "cpu", budget="auto", host=tmp_path) as handle:
        assert torch.equal(model(x), expected)
        whole = handle.report().resident_bytes
        free["bytes"] = 0
        for _ in range(2):
            assert torch.equal(model(x), expected)
        assert handle.report().resident_bytes < whole


def test_a_device_that_tells_nothing_is_refused_by_name(sim, monkeypatch):
    monkeypatch.delattr(sim.module, "mem_get_info")
    with pytest.raises(RuntimeError, match='which budget="auto" follows'):
        page(linears(4), sim.device, budget="auto")
    with page(linears(4), sim.device, budget=PagingBudget("1MiB")) as handle:
        assert handle.plan.ring_bytes
