"""How much may be used and how much was needed, measured on budgets of the CPU and on a device."""

import pytest
import torch

from tenure import adaptive
from tenure.adaptive import GlobalBatchsizeCache, memory_budget
from tenure.adaptive._memory._meter import meter_for

pytestmark = pytest.mark.usefixtures("forgetful")


def made(n_bytes, device="cpu"):
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def test_a_device_that_is_not_there_has_no_meter():
    assert meter_for(None) is None
    assert meter_for("nowhere:0") is None
    assert torch.cuda.is_available() or meter_for("cuda:0") is None


def test_the_host_tells_what_is_free_and_not_what_was_needed():
    meter = meter_for("cpu")
    assert meter.available_bytes() > 0
    meter.restart()
    assert meter.needed_bytes() is None
    assert not meter.measures


def test_a_budget_is_measured_and_its_own_peak_stays():
    with memory_budget(1000) as budget:
        kept = made(100)
        made(500)
        meter = meter_for("cpu")
        assert meter.available_bytes() == 900
        meter.restart()
        made(200)
        assert meter.needed_bytes() == 200
        assert (budget.live_bytes, budget.peak_bytes) == (100, 600)
    del kept


def test_of_nested_budgets_the_tighter_one_counts():
    with memory_budget(1000), memory_budget(300):
        assert meter_for("cpu").available_bytes() == 300


def test_a_device_is_measured_by_its_allocator(sim):
    sim(budget=1000)
    kept = made(100, sim.device)
    meter = meter_for("sim:0")
    assert meter.available_bytes() == 900
    meter.restart()
    made(300, sim.device)
    assert meter.needed_bytes() == 300
    with memory_budget(500, sim.device):
        assert meter_for("sim").available_bytes() == 500
    del kept


def load(n_rows, device):
    """Needs 4 KiB, and 3 KiB for each row."""
    fixed = made(4096, device)
    layers = [made(n_rows * 1024, device) for _ in range(3)]
    return fixed.numel() + sum(layer.numel() for layer in layers)


LARGEST = (1024 - 4) // 3


@pytest.mark.parametrize("initial", [350, 600, 1000, 5000, 20_000])
def test_calls_under_a_budget_find_95_percent_with_three_failures(initial):
    sizes = []

    @adaptive.batch(initial_batchsize=initial, cache_type=GlobalBatchsizeCache)
    def f(batchsize):
        sizes.append(batchsize)
        load(batchsize, "cpu")

    with memory_budget("1MiB"):
        for _ in range(10):
            f()
    assert sum(size > LARGEST for size in sizes) <= 3
    assert LARGEST * 0.95 <= sizes[-1] <= LARGEST


@pytest.mark.parametrize("initial", [350, 600, 1000, 5000, 30_000])
def test_pieces_on_a_device_find_95_percent_with_three_failures_in_one_call(sim, initial):
    sim(budget="1MiB")
    steps = []

    @adaptive.range(initial_step=initial)
    def f(start, end):
        steps.append(end - start)
        load(end - start, sim.device)

    f(0, 100_000)
    assert sum(step > LARGEST for step in steps) <= 3
    assert LARGEST * 0.95 <= steps[-2] <= LARGEST
    assert sim.allocated_bytes == 0


def test_the_exact_size_is_found_where_one_more_counts(sim):
    sim(budget=10_000)

    @adaptive.range(initial_step=64)
    def f(start, end):
        made((end - start) * 1000, sim.device)

    steps = []
    for _ in range(60):
        adaptive.explicit.range(
            lambda start, end: (steps.append(end - start), made((end - start) * 1000, sim.device)),
            0, 100, 64,
        )  # fmt: skip
    assert sum(step > 10 for step in steps) <= 3
    assert steps[-1] == 10


def test_results_that_are_kept_leave_less_for_the_next_piece(sim):
    sim(budget=100_000)
    steps = []

    @adaptive.range(initial_step=1000, collect="list")
    def f(start, end):
        steps.append(end - start)
        made((end - start) * 300, sim.device)
        return made((end - start) * 50, sim.device)

    results = f(0, 1500)
    assert sum(result.numel() for result in results) == 1500 * 50
    assert sim.allocated_bytes == 1500 * 50
    assert sum(steps) > 1500


# --- when nothing fits


def test_what_fits_at_no_size_runs_on_the_cpu_on_request(sim):
    sim(budget=10_000)
    x = torch.arange(12, dtype=torch.float32).to(sim.device)
    devices = []

    @adaptive.chunked(initial_step=4, minimum=2, cpu_fallback=True, collect="cat")
    def f(chunk, start, end, scale):
        devices.append((chunk.device.type, end - start))
        made(20_000, chunk.device) if chunk.device.type == "sim" else None
        chunk += 1
        return chunk * scale, {"start": start}["start"] + 0 * chunk

    doubled, starts = f(x, torch.tensor(2.0, device=sim.device))
    assert devices[:3] == [("sim", 4), ("sim", 2), ("cpu", 2)]
    assert doubled.device == starts.device == sim.device
    assert torch.equal(x.cpu(), torch.arange(1.0, 13.0))
    assert torch.equal(doubled.cpu(), 2 * torch.arange(1.0, 13.0))


def test_arguments_come_back_as_themselves_from_the_cpu(sim):
    sim(budget=10_000)
    x = torch.ones(3, device=sim.device)

    @adaptive.batch(initial_batchsize=1, cpu_fallback=True)
    def f(batchsize, tensor, *, more):
        if tensor.device.type == "sim":
            made(20_000, sim.device)
        assert more[0] is tensor
        more[0].add_(1)
        return tensor

    assert f(x, more=[x]) is x
    assert x.cpu().tolist() == [2.0] * 3


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
