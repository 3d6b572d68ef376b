"""budget="auto": all that is free, given back before it is missed, on the simulated device."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tenure.paging import PagingBudget, page, plan_paging

from .test_budget import FINE, WIDTH, Paged, bytes_of, linears

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
def test_a_model_that_fits_stays(sim):
    sim(budget=MEMORY)
    paged = Paged(sim, linears(8), "auto")
    run(sim, paged, 2)
    assert paged.handle.report().bytes_per_pass == 0
    paged.handle.unpage()


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


@exact
def test_who_comes_and_goes_all_the_time_is_not_followed_up_and_down(sim):
    sim(budget=MEMORY)
    paged = Paged(sim, linears(40), "auto")
    run(sim, paged, 8)
    found = []
    for i in range(32):
        sim.budget_bytes = MEMORY if i % 4 > 1 else max(sim.allocated_bytes + 2048, 3 * MEMORY // 4)
        found += run(sim, paged, 1)
    assert sum(before < after for before, after in pairwise(found)) <= 1
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


class Caching(nn.Module):
    """Layers that each keep what they have seen, one more row a pass."""

    def __init__(self, n_layers, width):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(n_layers)])

    def forward(self, x, seen):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            seen[i] = x if seen[i] is None else torch.cat([seen[i], x])
            x = x + seen[i].mean(0, keepdim=True)
        return x


def outputs(model, device, n_passes, rows):
    seen, width = [None] * len(model.layers), model.layers[0].in_features
    torch.manual_seed(1)
    return [model(torch.randn(rows, width).to(device), seen).cpu() for _ in range(n_passes)]


CACHES = [
    pytest.param("512KiB", 36, 64, 20, 1, marks=exact),
    pytest.param(
        "128MiB",
        28,
        1024,
        12,
        40,
        marks=[pytest.mark.sim_allocator("cuda"), pytest.mark.exhaustive],
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("memory", "n_layers", "width", "n_passes", "rows"), CACHES)
def test_a_cache_that_grows_has_room_where_a_plan_that_stays_has_none(
    sim, memory, n_layers, width, n_passes, rows
):
    torch.manual_seed(0)
    model = Caching(n_layers, width).eval()
    whole = copy.deepcopy(model).to(sim.device)
    expected = outputs(whole, sim.device, n_passes, rows)
    del whole
    sim(budget=memory)
    with page(model, sim.device, budget="auto") as handle:
        at_first = handle.plan.allocated_bytes
        found = outputs(model, sim.device, n_passes, rows)
        assert sim.n_ooms == 0
        assert all(map(torch.equal, found, expected))
        assert handle.report().allocated_bytes < at_first
    sim(budget=memory)
    with page(model, sim.device, budget=at_first), pytest.raises(torch.OutOfMemoryError):
        outputs(model, sim.device, n_passes, rows)


@pytest.mark.exhaustive
@exact
def test_a_language_model_generates_beyond_what_a_plan_that_stays_has_room_for(sim):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(3, 60, (8, 7))
    options = {"max_new_tokens": 26, "do_sample": False}
    whole = copy.deepcopy(model).to(sim.device)
    expected = whole.generate(tokens.to(sim.device), **options).cpu()
    del whole
    memory = int(bytes_of(model) * 1.6)
    sim(budget=memory)
    with page(model, sim.device, budget="auto") as handle:
        at_first = handle.plan.allocated_bytes
        assert torch.equal(model.generate(tokens, **options).cpu(), expected)
        assert sim.n_ooms == 0
        assert handle.report().allocated_bytes < at_first
    sim(budget=memory)
    with page(model, sim.device, budget=at_first), pytest.raises(torch.OutOfMemoryError):
        model.generate(tokens, **options)


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


@pytest.mark.exhaustive
@exact
def test_after_some_passes_one_asks_for_free_memory_once_a_unit_and_empties_no_cache(
    sim, monkeypatch
):
    sim(budget=MEMORY // 2)
    # Blocks of several modules, two blocks a unit.
    width, n_blocks = WIDTH // 4, 40
    blocks = [nn.Sequential(*[nn.Linear(width, width) for _ in range(5)]) for _ in range(n_blocks)]
    model, x = nn.Sequential(*blocks).eval(), torch.randn(4, width).to(sim.device)
    asked, emptied = [], []
    ask = sim.module.mem_get_info
    monkeypatch.setattr(sim.module, "mem_get_info", lambda *a: asked.append(a) or ask(*a))
    monkeypatch.setattr(sim.module, "empty_cache", lambda: emptied.append(1))
    with page(model, sim.device, "12KiB", budget="auto") as handle:
        n_asked, n_units = [], len(handle.plan.units)
        for _ in range(12):
            asked.clear()
            model(x)
            n_asked.append(len(asked))
        assert handle._engine.room.resident_bytes > handle.plan.resident_bytes
        assert n_asked[1] < 2 * n_blocks
        assert n_asked[-1] <= n_units + 4
    assert emptied == []
