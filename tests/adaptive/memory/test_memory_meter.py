"""How much may be used and how much was needed, measured on budgets of the CPU and on a device."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tenure import adaptive
from tenure.adaptive import NoBatchsizeCache, OutOfRetriesError, memory_budget

MIB = 1 << 20


def made(n_bytes, device="cpu"):
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def told_free(device, text=None):
    """The free memory that an error tells of a device, if it tells any."""

    @adaptive.batch(initial_batchsize=1, cache_type=NoBatchsizeCache)
    def work(size):
        raise RuntimeError(text or f"{device} out of memory. Tried to allocate 9.00 GiB")

    with pytest.raises(OutOfRetriesError) as caught:
        work()
    found = re.search(r"free (.*?)\)", str(caught.value))
    return found and found[1]


def test_the_host_tells_what_is_free_and_a_device_that_is_not_there_tells_nothing():
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1099511627776 bytes."
    assert told_free("cpu", text).endswith("GiB")
    assert told_free("nowhere:0") is None


# what fits, and what is measured because its first size does not
@pytest.mark.parametrize("initial", [200, 2000])
def test_a_budget_keeps_its_own_peak_while_calls_are_measured(initial):
    with memory_budget(1000) as budget:
        kept = made(100)
        made(800)
        # of the sizes that fit, each takes little
        adaptive.batch(initial_batchsize=initial)(
            lambda n: made(n if n < 1000 else 9 * n).numel()
        )()
        assert (budget.live_bytes, budget.peak_bytes) == (100, 900)
    del kept


@pytest.mark.sim_allocator("exact")
def test_of_a_device_and_nested_budgets_the_tightest_counts(sim):
    sim(budget=1000)
    kept = made(100, sim.device)
    assert told_free("sim:0") == "900 B"
    with memory_budget(500, sim.device):
        assert told_free("sim:0") == "500 B"
        with memory_budget(800, sim.device), memory_budget(300, sim.device):
            assert told_free("sim:0") == "300 B"
    del kept


@pytest.fixture
def fragmented(sim):
    """100 blocks of 4 MiB, of which every fifth is in use, of a GiB."""
    sim(allocator="cuda", budget="1GiB")
    kept = [made(4 * MIB, "sim") for _ in range(100)][::5]
    yield sim
    del kept


def test_free_parts_of_segments_are_available_where_segments_expand(fragmented, monkeypatch):
    assert told_free("sim:0") == "624.0 MiB"
    made(300 * MIB, "sim")  # goes to the cache, as a segment of its own
    assert fragmented.reserved_bytes == 700 * MIB
    assert told_free("sim:0") == "624.0 MiB"
    settings = "expandable_segments: True"
    name = "_accelerator_getAllocatorSettings"
    monkeypatch.setattr(torch._C, name, lambda: settings, raising=False)
    assert told_free("sim:0") == "944.0 MiB"


def test_a_budget_leaves_what_it_counts_whatever_other_threads_take(sim):
    sim(allocator="cuda", budget="1GiB")
    with memory_budget("50MiB", "sim"):
        kept = made(20 * MIB, "sim")
        with ThreadPoolExecutor(1) as executor:
            others = executor.submit(made, 120 * MIB, "sim").result()
        assert told_free("sim:0") == "30.0 MiB"
    del kept, others


# --- when nothing fits


def test_results_that_pile_up_make_the_pieces_smaller_before_they_fail():
    events, kept = [], 64

    @adaptive.range(initial_step=4096, collect="list", on_retry=events.append)
    def f(start, end):
        return torch.ones(end - start, 1024)[:, :kept].clone()

    n = 7 * 2**20 // (4 * kept)
    with memory_budget("8MiB"):
        assert sum(map(len, f(0, n))) == n
    assert len([event for event in events if event.kind == "shrink"]) <= 3
