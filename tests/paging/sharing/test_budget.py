"""Models that share a budget, or follow what is free, on the simulated device."""

import copy
import gc
import threading

import pytest
import torch

from tenure.paging import PagingBudget, PagingError, page, plan_paging
from tests.shrinking import ask_to_shrink

from ..models import linears
from ..support import weight_bytes, whole_output

pytestmark = pytest.mark.usefixtures("without_gradients")

WIDTH = 64
# A unit for each layer, so that memory is taken and given back in small steps.
FINE = {"max_layer_size": "17KiB"}


class Paged:
    """A model under a budget, and what it gives whole on the device."""

    def __init__(self, sim, model, budget, **options):
        self.sim, self.model = sim, model
        memory, sim.budget_bytes = sim.budget_bytes, None
        self.x = torch.randn(4, WIDTH).to(sim.device)
        self.expected = whole_output(sim.device, model, self.x)
        sim.budget_bytes = memory
        sim.reset_peak()
        self.handle = page(model, sim.device, budget=budget, **FINE, **options)

    def run(self, n_passes=1):
        for _ in range(n_passes):
            assert torch.equal(self.model(self.x).cpu(), self.expected)

    @property
    def resident_bytes(self):
        return self.handle.report().resident_bytes


@pytest.fixture
def two(sim):
    """Two models that are twice as large as what they share."""
    first, second = linears(12, WIDTH), linears(16, WIDTH, seed=1)
    budget = PagingBudget((weight_bytes(first) + weight_bytes(second)) // 2)
    both = Paged(sim, first, budget), Paged(sim, second, budget)
    yield budget, *both
    for each in both:
        each.handle.unpage()


def test_the_model_that_was_used_last_has_the_memory(sim, two):
    _, first, second = two
    first.run(3)
    before_bytes = first.resident_bytes
    second.run(3)
    assert second.resident_bytes > before_bytes // 2 > first.resident_bytes
    first.run(3)
    second_bytes = second.resident_bytes
    assert first.resident_bytes > second_bytes


@pytest.mark.parametrize("turns", [(1, 1), (4, 6)])
def test_values_are_exact_and_the_bytes_within_the_limit_whatever_the_turns(sim, two, turns):
    budget, first, second = two
    activation_bytes = 16 * 4 * WIDTH * 4
    sim.reset_peak()
    for _ in range(4):
        for each, n_passes in zip((first, second), turns, strict=True):
            each.run(n_passes)
            assert budget.held_bytes <= budget.limit_bytes
    assert sim.peak_bytes <= budget.limit_bytes + activation_bytes


def test_a_model_that_is_closed_leaves_its_share_to_the_others(sim, two):
    budget, first, second = two
    first.run(4)
    second.run(4)
    second.handle.unpage()
    first.run(3)
    assert first.handle.report().bytes_per_pass == 0
    assert budget.held_bytes == sim.allocated_bytes - first.x.nbytes - second.x.nbytes
    first.handle.unpage()
    assert budget.held_bytes == 0
    assert repr(budget).endswith("no models>")
    page(linears(12, WIDTH), sim.device, budget=budget, **FINE)
    gc.collect()
    assert budget.held_bytes == 0


def test_a_model_that_runs_on_another_thread_loses_nothing_that_it_uses(sim, two):
    _, first, second = two
    first.run(3)
    inside, done = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        assert done.wait(20)

    hook = first.model[5].register_forward_hook(wait)
    thread = threading.Thread(target=torch.no_grad()(first.run))
    before_bytes = first.resident_bytes
    thread.start()
    assert inside.wait(20)
    second.run(2)
    assert first.handle._engine.room.resident_bytes == before_bytes
    done.set()
    thread.join()
    hook.remove()
    second.run(6)
    assert first.resident_bytes < before_bytes


def test_what_a_retry_was_given_is_not_taken_again_at_once(sim, two):
    budget, first, _ = two
    first.run(4)
    limit_bytes = budget.limit_bytes
    given_bytes = ask_to_shrink(str(sim.device), 10_000)
    assert given_bytes >= 10_000
    assert budget.limit_bytes == budget.held_bytes <= limit_bytes - 10_000
    first.run(3)
    assert budget.held_bytes <= budget.limit_bytes < limit_bytes
    first.run(30)
    assert budget.limit_bytes == limit_bytes


def test_what_does_not_fit_is_refused_and_leaves_the_budget_as_it_was(sim):
    budget = PagingBudget("40KiB")
    with page(linears(12, WIDTH), sim.device, budget=budget):
        held_bytes = budget.held_bytes
        told = (
            r"can't be paged within .* what other models leave of <PagingBudget 40\.0 KiB on sim:0"
            r".*\. You may also page this model before them\.$"
        )
        with pytest.raises(PagingError, match=told):
            page(linears(4, WIDTH), sim.device, budget=budget, keep=["0", "1", "2"])
        assert budget.held_bytes <= held_bytes
    with pytest.raises(PagingError, match="0% to 100%"):
        PagingBudget("0%")


def test_a_budget_is_of_one_device(sim):
    two = sim(devices=2)
    budget = PagingBudget("40KiB")
    with page(linears(4, WIDTH), "sim:0", budget=budget):
        model = linears(4, WIDTH)
        with pytest.raises(PagingError, match="Make another PagingBudget"):
            page(model, "sim:1", budget=budget)
        assert two.on(1).allocated_bytes == 0
    page(model, "sim:1", budget=budget).unpage()


def test_weights_on_a_disk_share_a_budget_of_memory(tmp_path):
    first, second = linears(12, WIDTH), linears(16, WIDTH, seed=1)
    expected = [model(torch.ones(2, WIDTH)) for model in (first, second)]
    budget = PagingBudget((weight_bytes(first) + weight_bytes(second)) // 2)
    with (
        page(first, "cpu", budget=budget, host=tmp_path),
        page(second, "cpu", budget=budget, host=tmp_path),
    ):
        for n_passes in (1, 4, 4):
            for model, values in zip((first, second), expected, strict=True):
                for _ in range(n_passes):
                    assert torch.equal(model(torch.ones(2, WIDTH)), values)
                assert budget.held_bytes <= budget.limit_bytes


# --- budget="auto": all that is free, given back before it is missed

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
    model = linears(40, WIDTH)
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
    paged = Paged(sim, linears(40, WIDTH), "auto")
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


@exact
def test_weights_go_within_a_pass_before_memory_runs_out(sim):
    sim(budget=MEMORY)
    model, kept = linears(40, WIDTH), []
    for layer in model:
        layer.register_forward_hook(lambda *called: kept.append(called[-1]))
    x = torch.randn(25, WIDTH)
    expected = copy.deepcopy(model)(x)
    with page(model, sim.device, budget="auto", **FINE) as handle:
        before_bytes = handle._engine.room.resident_bytes
        x = x.to(sim.device)
        # outputs of all layers take more than is left beside the weights, and little at a time
        assert 40 * x.nbytes > MEMORY - sim.allocated_bytes
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
            kept.clear()
        assert handle._engine.room.resident_bytes < before_bytes
    assert sim.n_ooms == 0


@exact
def test_models_that_follow_what_is_free_share_it(sim):
    sim(budget=MEMORY)
    first = Paged(sim, linears(20, WIDTH), "auto")
    second = Paged(sim, linears(22, WIDTH, seed=1), "auto")
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
    model, x = linears(12, WIDTH), torch.ones(2, WIDTH)
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
        page(linears(4, WIDTH), sim.device, budget="auto")
    with page(linears(4, WIDTH), sim.device, budget=PagingBudget("1MiB")) as handle:
        assert handle.plan.ring_bytes
