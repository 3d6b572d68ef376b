"""The largest batch that fits, found by running it: on the CPU, and on a simulated device."""

import random
import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tenure import is_disposed
from tenure.adaptive import AdaptiveUsageError, OutOfRetriesError, find_batch_size, memory_budget

from .finding import Training, network
from .sizes.loads import Load, loads
from .unchanged import unchanged

pytestmark = pytest.mark.usefixtures("quiet")


BUDGET = 2 << 20
MEMORY = {
    "around the call": {},
    "of the host": {},
    "of the call": {"budget": BUDGET, "low": 5, "align": 48},
    # a share of the budget that is left free
    "with a margin": {"budget": 2 * BUDGET, "margin": 0.5},
}


@pytest.mark.parametrize("which", MEMORY)
def test_95_percent_of_the_memory_that_is_meant_are_found_in_multiples_of_align(which, monkeypatch):
    if which == "of the host":
        monkeypatch.setattr("tenure.adaptive._find_batch_size.free_host_bytes", lambda: BUDGET)
    options, train = {"margin": 0} | MEMORY[which], Training(network())
    align = options.get("align", 1)
    with memory_budget(BUDGET) if which == "around the call" else nullcontext():
        found = find_batch_size(train, high=1 << 20, **options)
    assert len(train.failed) <= (0 if options["margin"] else 3)
    assert all(size % align == 0 for size in train.sizes)
    assert which == "of the host" or train.fits(found, BUDGET)
    assert not train.fits(int(found / 0.95) + align, BUDGET)


@pytest.mark.parametrize(
    ("wall", "high", "margin"), [(1, 64, 0), (777, 10**6, 0), (777, 10**6, 0.3)]
)
def test_where_nothing_is_measured_sizes_double_until_one_fails(wall, high, margin):
    sizes = []

    def work(size):
        sizes.append(size)
        if size > wall:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    found = find_batch_size(work, high=high, margin=margin)
    assert found in sizes
    assert 0.95 * wall <= found / (1 - margin) <= wall
    assert sum(size > wall for size in sizes) <= 3


def test_nothing_of_a_run_stays():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    kept = []

    def train(size):
        out = net(torch.randn(size, 8))
        kept.append(out)
        (out.square().mean() * random.random()).backward()
        return out

    net[0].weight.grad = torch.ones(8, 8)
    with unchanged(net):
        assert find_batch_size(train, low=2, high=512, budget="64KiB") < 512
    assert all(map(is_disposed, kept))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("optimizer", r"SGD\.step\(\) was called inside find_batch_siz"),
        *[(how, "writes the parameter") for how in ("data in place", "other data")],
    ],
)
def test_weights_that_the_function_moves_are_named_and_left(how, named):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(size):
        net(torch.randn(size, 64)).square().mean().backward()
        if how == "optimizer":
            optimizer.step()
        for p in net.parameters():
            if how == "data in place":
                p.data.sub_(p.grad)
            elif how == "other data":
                p.data = p.data - p.grad

    with unchanged(net), pytest.raises(AdaptiveUsageError, match=named) as caught:
        find_batch_size(train, high=64, budget="16MiB")
    assert how == "optimizer" or "net.0.0.weight" in str(caught.value)


def test_an_error_of_the_function_is_told_the_size_that_it_ran_at():
    net = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        find_batch_size(lambda size: net(torch.randn(size, 4)), high=64)
    assert "at batch size 1, between low=1 and high=64" in caught.value.__notes__[0]


def test_a_model_and_an_optimizer_of_the_run_itself_may_do_what_they_like():
    def train(size):
        net = network()
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.randn(size, 64)).square().mean().backward()
        optimizer.step()

    assert find_batch_size(train, high=64, budget="16MiB") == 64


def test_a_smallest_size_that_does_not_fit_is_told_with_numbers():
    train = Training(network())
    with pytest.raises(OutOfRetriesError) as raised:
        find_batch_size(train, low=10_000, high=20_000, budget="1MiB")
    assert raised.value.sizes == (10_000,)
    assert re.search(
        r"^1 attempt of 'Training' ran out of cpu memory \(batch size 10000; needed 2\.4 MiB.*, "
        r"free 1\.0 MiB\)\. Allow less than 10000 with low=",
        str(raised.value),
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"low": 0, "high": 4}, r"^low=0 is not a size\."),
        ({"high": 2.5}, r"^high=2\.5 is not a size\."),
        ({"low": 8, "high": 4}, r"got low=8 and high=4, between which there is no size\. Raise"),
        ({"low": 9, "high": 15, "align": 8}, r"there is no size, in multiples of align=8\. Raise"),
        ({"high": 4, "margin": 1}, r"got margin=1\. Give the share of the memory"),
        ({"high": 4, "device": "nowhere"}, r"got device='nowhere': .*Name a device"),
    ],
)
def test_an_argument_that_can_not_be_used_is_named(options, told):
    with pytest.raises(AdaptiveUsageError, match=told):
        find_batch_size(lambda size: None, **options)


@settings(deadline=None, max_examples=60)
@given(loads(256.0, 0.9, (1.0, 2.0), (1.0, 1.3)), st.sampled_from([1, 8, 12]), st.booleans())
def test_whatever_memory_grows_with_95_percent_are_found_with_three_failures(case, align, is_low):
    load, high = case
    high = max(align, high // (4 if is_low else 1) // align * align)
    largest = min(load.largest, high) // align * align
    budget = load.limit + load.own
    found = find_batch_size(load, low=align, high=high, align=align, budget=budget, margin=0)
    assert found in load.sizes
    assert 20 * found >= 19 * largest
    assert largest < high or found == high
    assert len(load.failed) <= 3
    assert all(size % align == 0 and align <= size <= high for size in load.sizes)
    assert len(load.sizes) <= 60


def test_sizes_grow_eight_times_at_most_and_a_line_takes_few_runs():
    load = Load(600 << 20, 1000, fixed=1 << 20)
    assert find_batch_size(load, high=1 << 24, budget=load.limit, margin=0) == 615012
    assert load.sizes == [1, 8, 64, 512, 4096, 32768, 262144, 615012]
    assert load.failed == []


def test_a_size_that_runs_beyond_its_margin_shows_where_the_next_ones_are():
    """As where a kernel takes a workspace from a size on, which no line foretells."""
    sizes, more_bytes = [], 200_000

    def work(size):
        sizes.append(size)
        torch.empty(100 * size + more_bytes * (size >= 5000), dtype=torch.uint8)

    found = find_batch_size(work, high=1 << 20, budget="2MiB", margin=0.5)
    largest = ((1 << 20) - more_bytes) // 100
    assert 0.95 * largest <= found <= largest
    assert len(sizes) <= 9


def test_on_a_device_95_percent_are_found_with_three_failures(sim):
    sim(budget="48MiB", allocator="cuda")
    train = Training(network(sim.device))
    resting_bytes = sim.allocated_bytes
    found = find_batch_size(train, high=1 << 20, margin=0)
    assert sim.n_ooms <= 3
    assert len(train.failed) <= 3
    assert found in train.sizes
    assert sim.allocated_bytes == resting_bytes
    torch.get_device_module(sim.device).empty_cache()
    for factor in (1.06, 1.12, 1.3):
        with pytest.raises(torch.OutOfMemoryError):
            train(int(found * factor) + 1)
        train.net.zero_grad()
        torch.get_device_module(sim.device).empty_cache()


def test_a_budget_on_a_device_counts(sim):
    sim(budget="1GiB")
    train = Training(network(sim.device))
    found = find_batch_size(train, high=1 << 20, budget="4MiB", margin=0)
    assert len(train.failed) <= 3
    assert found < 20_000
    assert sim.peak_bytes < 6 << 20
