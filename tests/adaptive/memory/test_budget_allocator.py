"""A budget on a device with a caching allocator: counted exactly, however it caches."""

import random
import threading
from types import SimpleNamespace

import pytest
import torch

from tenure._torch.modes import open_modes
from tenure.adaptive import AdaptiveUsageError, memory_budget

# private: nobody else can be interrupted exactly where a budget opens
from tenure.adaptive._memory._counting import CountingMode, counting_on

MIB = 1 << 20


def on_device(n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device="sim")


@pytest.fixture
def cuda_like(sim):
    sim(allocator="cuda", budget=8 << 30)
    return sim


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_interrupt_while_a_budget_opens_leaves_nothing_of_it(cuda_like, monkeypatch, place):
    opened = CountingMode.open

    def interrupted(self):
        if place == "after":
            opened(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(CountingMode, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), memory_budget("1MiB", "sim"):
        pytest.fail("it was interrupted before its block")
    assert open_modes() == counting_on("sim") == []


# --- the limit itself


def test_a_fragmented_cache_lends_a_budget_nothing(cuda_like):
    kept = [on_device(4 * MIB) for _ in range(100)][::5]
    assert cuda_like.reserved_bytes == 400 * MIB
    with memory_budget("8MiB", "sim") as budget:
        made = [on_device(4 * MIB), on_device(4 * MIB)]
        with pytest.raises(torch.OutOfMemoryError, match=r"memory_budget has a limit of 8\.0 MiB"):
            on_device(1)
        assert cuda_like.allocated_bytes == (20 + 2) * 4 * MIB
        assert budget.live_bytes == budget.peak_bytes == 8 * MIB
    del kept, made


@pytest.mark.parametrize(("limit", "n_bytes"), [("12MiB", 2 * MIB), ("1MiB", 1024), ("1KiB", 1)])
def test_what_is_within_the_limit_fits_though_a_segment_is_larger(cuda_like, limit, n_bytes):
    with memory_budget(limit, "sim") as budget:
        kept = on_device(n_bytes)
        assert budget.live_bytes == n_bytes
    del kept


def test_rounding_to_blocks_is_the_allocators_and_not_the_programs(cuda_like):
    with memory_budget(1000, "sim") as budget:
        kept = [on_device(1) for _ in range(1000)]
        assert (budget.live_bytes, cuda_like.allocated_bytes) == (1000, 512 * 1000)
    del kept


def churned(seed, limit_bytes, draw):
    """A random program that never holds more than the limit; how often it was refused."""
    numbers, held, held_bytes, refused = random.Random(seed), [], 0, 0
    for _ in range(400):
        n_bytes = draw(numbers)
        while held and (held_bytes + n_bytes > limit_bytes or numbers.random() < 0.2):
            held_bytes -= held.pop(numbers.randrange(len(held))).nbytes
        try:
            held.append(on_device(n_bytes))
        except torch.OutOfMemoryError:
            refused += 1
        else:
            held_bytes += n_bytes
    return refused


@pytest.mark.parametrize(
    "draw",
    [
        lambda numbers: int(2 ** numbers.uniform(10, 24)),
        lambda numbers: int(numbers.uniform(6.7, 7) * MIB),
        lambda numbers: int(numbers.uniform(10, 12) * MIB),
    ],
    ids=["of all sizes", "two to a segment", "rounded to 2 MiB"],
)
def test_what_is_within_the_limit_is_never_refused(cuda_like, draw):
    with memory_budget("256MiB", "sim"):
        assert sum(churned(seed, 256 * MIB, draw) for seed in range(5)) == 0


def test_the_peak_of_the_allocator_stays_the_programs(cuda_like):
    on_device(4 * MIB)
    with memory_budget("1MiB", "sim"):
        pass
    assert cuda_like.module.max_memory_allocated() == 4 * MIB


def test_another_thread_cannot_end_the_limit(cuda_like):
    errors = []

    def work(budget):
        try:
            budget.__exit__(None, None, None)
        except AdaptiveUsageError as error:
            errors.append(str(error))

    with memory_budget("10MiB", "sim") as budget:
        thread = threading.Thread(target=work, args=(budget,))
        thread.start()
        thread.join()
        assert budget.live_bytes == 0
    assert "stays open" in errors[0]


# --- other devices


def module_with(names, **more):
    """A device module with functions that must not be called, and others."""
    functions = {name: lambda *_: pytest.fail("it was called") for name in names}
    return SimpleNamespace(**{**functions, **more})


OF_MPS = (
    "current_allocated_memory", "driver_allocated_memory", "empty_cache", "get_rng_state",
    "recommended_max_memory", "set_per_process_memory_fraction", "set_rng_state", "synchronize",
)  # fmt: skip
"""The functions of ``torch.mps``."""


@pytest.mark.parametrize("n_devices", [0, 1])
def test_a_device_that_is_the_only_one_of_its_kind_has_index_0(monkeypatch, n_devices):
    mps = module_with(OF_MPS, device_count=lambda: n_devices, is_available=lambda: n_devices > 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: mps)
    if n_devices:
        budget = memory_budget(500, "mps")
        assert budget.device == torch.device("mps:0")
        with budget:
            pass
    else:
        with pytest.raises(AdaptiveUsageError, match="'mps': this machine, or this build of torch"):
            memory_budget(500, "mps")


def test_a_device_with_too_small_an_index_is_named(sim):
    with pytest.raises(AdaptiveUsageError, match="'sim:1': this machine has 1 of its type"):
        memory_budget(500, "sim:1")


def test_a_budget_during_a_capture_is_refused(cuda_like, monkeypatch):
    capturing = [True]
    monkeypatch.setattr(
        cuda_like.module, "is_current_stream_capturing", lambda: capturing[0], raising=False
    )
    budget = memory_budget("1MiB", "sim")
    with pytest.raises(AdaptiveUsageError, match="while a graph is being captured on sim:0"):
        budget.__enter__()
    with memory_budget("1MiB", "cpu"):
        pass
    capturing[0] = False
    with budget:
        capturing[0] = True


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_budget_on_cuda_is_exact():
    before = torch.cuda.get_per_process_memory_fraction()
    with memory_budget("256MiB", "cuda") as budget:
        kept = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="memory_budget has a limit of 256"):
            torch.empty(160 * MIB, dtype=torch.uint8, device="cuda")
        assert budget.live_bytes == kept.nbytes
    assert torch.cuda.get_per_process_memory_fraction() == before
