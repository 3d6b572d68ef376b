"""How much may be used and how much was needed, measured on budgets of the CPU and on a device."""

import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tenure import adaptive
from tenure.adaptive import (
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    OutOfRetriesError,
    memory_budget,
)

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("forgetful")


def made(n_bytes, device="cpu"):
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def made_by_another_thread(n_bytes, device):
    """Memory that no budget of this thread counts."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(made, n_bytes, device).result()


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


def test_the_free_parts_of_segments_in_use_are_not_available(fragmented):
    assert told_free("sim:0") == "624.0 MiB"
    made(300 * MIB, "sim")  # goes to the cache, as a segment of its own
    assert fragmented.reserved_bytes == 700 * MIB
    assert told_free("sim:0") == "624.0 MiB"


def test_available_is_what_the_fraction_leaves_beside_what_is_reserved(fragmented):
    fragmented.module.set_per_process_memory_fraction(0.5)
    assert told_free("sim:0") == "112.0 MiB"
    fragmented.module.set_per_process_memory_fraction(0.125)  # below what is reserved
    assert told_free("sim:0") == "0 B"


def test_free_parts_can_be_given_back_where_segments_expand(fragmented, monkeypatch):
    settings = "expandable_segments: True"
    name = "_accelerator_getAllocatorSettings"
    monkeypatch.setattr(torch._C, name, lambda: settings, raising=False)
    assert told_free("sim:0") == "944.0 MiB"


def test_a_budget_leaves_what_it_counts_whatever_other_threads_take(sim):
    sim(allocator="cuda", budget="1GiB")
    with memory_budget("50MiB", "sim"):
        kept = made(20 * MIB, "sim")
        others = made_by_another_thread(120 * MIB, "sim")
        assert told_free("sim:0") == "30.0 MiB"
    del kept, others


class OfXpu:
    """The functions of ``torch.xpu`` that tell and limit memory; it counts no split blocks."""

    def __init__(self):
        self.fraction = 1.0
        self.stats = {"allocated_bytes": 10, "active_bytes": 12, "reserved_bytes": 20}

    def current_device(self):
        return 0

    def memory_stats(self, device):
        return {f"{name}.all.current": n * MIB for name, n in self.stats.items()}

    def max_memory_allocated(self, device):
        return 15 * MIB

    def memory_allocated(self, device):
        return 10 * MIB

    def memory_reserved(self, device):
        return 20 * MIB

    def reset_peak_memory_stats(self, device):
        pass

    def mem_get_info(self, device):
        return 100 * MIB, 200 * MIB

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=200 * MIB)

    def get_per_process_memory_fraction(self, device):
        return self.fraction

    def set_per_process_memory_fraction(self, fraction, device):
        self.fraction = fraction

    def empty_cache(self):
        pass


def test_xpu_is_measured_by_what_it_counts(monkeypatch):
    fake = OfXpu()
    assert all(hasattr(torch.xpu, name) for name in vars(OfXpu) if not name.startswith("_"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    assert told_free("xpu:0") == "108.0 MiB"
    fake.fraction = 0.25
    assert told_free("xpu:0") == "38.0 MiB"
    fake.fraction = 1.0
    del fake.stats["active_bytes"], fake.stats["reserved_bytes"]
    assert told_free("xpu:0") == "110.0 MiB"


def test_a_driver_that_tells_no_free_memory_is_not_measured(monkeypatch):
    def mem_get_info(device):
        raise RuntimeError("The device (...) doesn't support querying the available free memory.")

    fake = OfXpu()
    fake.mem_get_info = mem_get_info
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    assert told_free("xpu:0") is None


def load(n_rows, device, unit=1024):
    """Needs 4 KiB, and 3 KiB for each row; of another unit than KiB as much."""
    fixed = made(4 * unit, device)
    layers = [made(n_rows * unit, device) for _ in range(3)]
    return fixed.numel() + sum(layer.numel() for layer in layers)


LARGEST = (1024 - 4) // 3


@pytest.mark.parametrize("kept_bytes", [0, MIB // 2])
@pytest.mark.parametrize("initial", [350, 600, 1000, 5000, 20_000])
def test_calls_under_a_budget_find_95_percent_with_three_failures(initial, kept_bytes):
    sizes = []

    @adaptive.batch(initial_batchsize=initial, cache_type=GlobalBatchsizeCache)
    def f(batchsize):
        sizes.append(batchsize)
        load(batchsize, "cpu")

    with memory_budget(MIB + kept_bytes):
        kept = made(kept_bytes)
        for _ in range(10):
            f()
        del kept
    assert sum(size > LARGEST for size in sizes) <= 3
    assert LARGEST * 0.95 <= sizes[-1] <= LARGEST


@pytest.mark.parametrize("initial", [350, 600, 1000, 5000, 30_000])
def test_pieces_on_a_device_find_95_percent_with_three_failures_in_one_call(sim, initial):
    sim(budget="1GiB")
    steps = []

    @adaptive.range(initial_step=initial)
    def f(start, end):
        steps.append(end - start)
        load(end - start, sim.device, unit=1 << 20)

    f(0, 100_000)
    assert sum(step > LARGEST for step in steps) <= 3
    # of CUDA's memory the pieces that did not fit have cut up some
    least = {"exact": 0.95, "cuda": 0.85}[sim.allocator]
    assert LARGEST * least <= steps[-2] <= LARGEST
    assert sim.allocated_bytes == 0


def test_the_exact_size_is_found_where_one_more_counts(sim):
    sim(budget="20MiB")
    steps = []

    def f(start, end):
        steps.append(end - start)
        made((end - start) * 2 << 20, sim.device)

    for _ in range(60):
        adaptive.explicit.range(f, 0, 100, 64)
    assert sum(step > 10 for step in steps) <= 3
    assert steps[-1] == 10


@pytest.mark.parametrize("row_bytes", [300 * 1024, MIB])
def test_a_fragmented_cache_misleads_no_search(sim, row_bytes):
    sim(allocator="cuda", budget="1GiB")
    kept = [made(4 * MIB, "sim") for _ in range(100)][::5]
    steps, kinds = [], []

    @adaptive.range(initial_step=3000, on_retry=lambda event: kinds.append(event.kind))
    def f(start, end):
        steps.append(end - start)
        fixed = made(40 * MIB, "sim")
        return fixed, [made((end - start) * row_bytes // 8, "sim") for _ in range(8)]

    f(0, 6000)
    largest = (1024 - 400 - 40) * MIB // row_bytes
    assert kinds.count("shrink") <= 3
    # a cache that was cut up by smaller pieces is given back once, and that was worth it
    assert kinds.count("retry") <= 1
    assert "retry" not in kinds or kinds[kinds.index("retry") + 1] == "grow"
    assert 0.9 * largest <= max(step for step in steps if step <= largest)
    del kept


def test_results_that_are_kept_leave_less_for_the_next_piece(sim):
    sim(budget=100_000 << 10)
    steps = []

    @adaptive.range(initial_step=1000, collect="list")
    def f(start, end):
        steps.append(end - start)
        made((end - start) * 300 << 10, sim.device)
        return made((end - start) * 50 << 10, sim.device)

    results = f(0, 1500)
    assert sum(result.numel() for result in results) == 1500 * 50 << 10
    assert sim.requested_bytes == 1500 * 50 << 10
    assert sum(steps) > 1500


# --- when nothing fits


@pytest.mark.parametrize("kept", [64, 512])
def test_results_that_pile_up_make_the_pieces_smaller_before_they_fail(kept):
    events = []

    @adaptive.range(initial_step=4096, collect="list", on_retry=events.append)
    def f(start, end):
        return torch.ones(end - start, 1024)[:, :kept].clone()

    n = 7 * 2**20 // (4 * kept)
    with memory_budget("8MiB"):
        assert sum(map(len, f(0, n))) == n
    assert len([event for event in events if event.kind == "shrink"]) <= 3


def test_pieces_grow_back_where_what_piled_up_is_gone():
    sizes, kept = [], []

    @adaptive.range(initial_step=4096)
    def f(start, end):
        sizes.append(end - start)
        kept.append(torch.ones(end - start, 1024)[:, :512].clone())
        if start > 2000:
            kept.clear()

    with memory_budget("8MiB"):
        f(0, 16000)
    full = sizes[1:-1]  # without the one that failed, and the rest at the end
    assert min(full) < full[0] <= full[-1]
