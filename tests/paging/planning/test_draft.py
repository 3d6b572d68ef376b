"""On a device with CUDA's caching allocator, paging takes what its plan says, and no more."""

import copy
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tenure.adaptive import batch
from tenure.paging import PagingError, page, plan_paging
from tests.shrinking import ask_to_shrink

from ..support import FIXTURES_ONCE

# about what it reserves, by rules that the exact one lacks
pytestmark = [pytest.mark.sim_allocator("cuda"), pytest.mark.usefixtures("without_gradients")]

MIB = 2**20
SEGMENT = 20 * MIB
ON_SIM = settings(FIXTURES_ONCE, max_examples=15)


class Layer(nn.Module):
    """So many bytes of weights, of which a forward reads the ends and the middle."""

    def __init__(self, n_bytes, value=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((max(4, n_bytes // 4),), value))

    def forward(self, x):
        n = len(self.weight)
        ends = torch.stack([self.weight[i : i + 2].sum() for i in (0, n // 2, n - 2)])
        return x + ends


def layers(*sizes_in_mib):
    return nn.Sequential(*[Layer(int(n * MIB), i + 0.5) for i, n in enumerate(sizes_in_mib)]).eval()


def assert_as_planned(sim, plan, *, pins=True):
    """What the allocator says of a device on which nothing else is."""
    assert sim.allocated_bytes == plan.allocated_bytes <= plan.budget_bytes
    # pinning asks the device for a byte, once, whose small segment stays cached
    reserved = (plan.reserved_bytes, plan.reserved_bytes + pins * 2 * MIB)
    assert sim.reserved_bytes in reserved


X = torch.zeros(3)


# 40 layers of 11.5 MiB are among the checks on a GPU, which run on the simulated device too
def test_neither_allocated_nor_reserved_bytes_exceed_the_budget_and_segments_go_back_whole(sim):
    sim(allocator="cuda", detect_races=False)
    model, n_wanted = layers(*[7] * 20), 12 * MIB
    expected = copy.deepcopy(model)(X)
    with page(model, sim.device, budget="100MiB", host="pageable") as handle:
        assert_as_planned(sim, handle.plan, pins=False)
        assert sim.reserved_bytes <= 100 * MIB
        assert sim.allocated_bytes > 0.97 * 100 * MIB  # most of it is of use
        stays_bytes = sum(unit.n_bytes for unit in handle.plan.units if unit.resident)
        assert stays_bytes + handle.plan.ring_bytes > 0.95 * 100 * MIB
        for _ in range(2):
            assert torch.equal(model(X).cpu(), expected)
        report = handle.report()
        assert report.resident_bytes == handle.plan.resident_bytes
        assert report.allocated_bytes == handle.plan.allocated_bytes
        assert report.reserved_bytes == handle.plan.reserved_bytes
        assert sim.reserved_bytes <= 102 * MIB  # and a segment for what is small
        sim.module.empty_cache()
        before_bytes, stayed_bytes = sim.reserved_bytes, report.resident_bytes
        given_bytes = ask_to_shrink("sim", n_wanted)
        assert n_wanted <= given_bytes < n_wanted + 20 * MIB
        sim.module.empty_cache()
        assert sim.reserved_bytes == before_bytes - given_bytes
        for _ in range(2):
            assert torch.equal(model(X).cpu(), expected)
        report = handle.report()
        assert report.resident_bytes == stayed_bytes - given_bytes
        assert report.allocated_bytes == sim.allocated_bytes == before_bytes - given_bytes
        while ask_to_shrink("sim", 1 << 40):
            assert torch.equal(model(X).cpu(), expected)
        assert ask_to_shrink("sim", 1) == 0
    assert sim.allocated_bytes == 0
    sim.module.empty_cache()
    assert sim.reserved_bytes == 0


SIZES = st.lists(
    st.one_of(st.sampled_from([0.3, 1, 5, 7, 10]), st.floats(0.001, 24)), min_size=1, max_size=12
)


def plan_within(model, device, budget_bytes):
    """A plan within a budget, or within the least that does."""
    try:
        return plan_paging(model, device, budget=budget_bytes)
    except PagingError as error:
        return plan_paging(model, device, budget=error.minimum_bytes)


@settings(ON_SIM, max_examples=40)
@given(sizes=SIZES, percent=st.integers(1, 110), n_odd_bytes=st.integers(0, 4096))
def test_any_plan_is_within_its_budget_and_reserves_a_segment_more_at_most(
    sim, sizes, percent, n_odd_bytes
):
    with torch.device("meta"):
        model = layers(*sizes)
    budget_bytes = int(sum(sizes) * MIB) * percent // 100 + n_odd_bytes
    plan = plan_within(model, sim.device, budget_bytes)
    assert plan.allocated_bytes <= plan.budget_bytes
    assert plan.reserved_bytes <= plan.budget_bytes + SEGMENT
    if plan.allocated_bytes >= SEGMENT:
        assert plan.reserved_bytes == plan.allocated_bytes
    assert plan.resident_bytes + plan.ring_bytes <= plan.allocated_bytes


@ON_SIM
@given(others=st.lists(st.floats(0.001, 40), max_size=6), sizes=SIZES, percent=st.integers(20, 100))
def test_what_others_have_left_in_the_cache_adds_no_segment(sim, others, sizes, percent):
    sim(allocator="cuda", detect_races=False)
    left = [torch.empty(int(n * MIB), dtype=torch.uint8, device=sim.device) for n in others]
    del left
    before_bytes = sim.reserved_bytes
    model = layers(*sizes)
    plan = plan_within(model, sim.device, int(sum(sizes) * MIB) * percent // 100)
    with page(model, sim.device, budget=plan.budget_bytes, host="pageable"):
        n_slabs = sim.module.memory_stats()["allocation.all.current"]
        assert sim.allocated_bytes <= plan.budget_bytes + n_slabs * MIB
        assert sim.reserved_bytes <= before_bytes + plan.reserved_bytes


@ON_SIM
@given(free_mib=st.integers(1, 90), share=st.sampled_from(["80%", "100%", "30%"]), sizes=SIZES)
def test_a_share_of_what_is_free_is_never_too_much(sim, free_mib, share, sizes):
    sim(allocator="cuda", budget=free_mib * MIB, detect_races=False)
    model = layers(*sizes)
    with suppress(PagingError), page(model, sim.device, budget=share) as handle:
        assert_as_planned(sim, handle.plan)
    assert sim.n_ooms == 0


def test_a_plan_says_what_is_allocated_and_what_is_reserved(sim):
    sim(allocator="cuda")
    plan = plan_paging(layers(5, 5, 5), sim.device, "5MiB", budget="9MiB")
    assert (plan.allocated_bytes, plan.reserved_bytes) == (9 * MIB, 20 * MIB)
    assert "\n  takes   9.0 MiB of sim:0, in 20.0 MiB that its allocator reserves\n" in str(plan)
    plan = plan_paging(layers(5, 5, 5), sim.device, "5MiB", budget="11MiB")
    assert plan.resident_bytes + plan.ring_bytes == plan.allocated_bytes == plan.reserved_bytes
    assert "allocator" not in str(plan)


def test_a_batch_that_ran_out_of_memory_fits_in_what_is_given_back(sim):
    sim(allocator="cuda", budget="130MiB")
    model, events = layers(*[7] * 20), []

    @batch(initial_batchsize=16, on_retry=events.append)
    def forward(batch_size):
        x = torch.zeros(batch_size * MIB // 4, 3, device=sim.device)[:1]
        return model(x).cpu()

    expected = copy.deepcopy(model)(X)
    with page(model, sim.device, budget="90MiB"):
        for _ in range(2):
            assert torch.equal(forward()[0], expected)
    assert [event.kind for event in events] == ["retry"]
    assert events[0].freed_bytes >= 8 * MIB  # what 48 MiB lack where 90 of 130 are taken
