"""A budget on a device with a caching allocator: counted exactly, however it caches."""

import random

import pytest
import torch

from tenure.adaptive import AdaptiveUsageError, memory_budget

# private: nobody else can be interrupted exactly where a budget opens

MIB = 1 << 20


def on_device(n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device="sim")


@pytest.fixture
def cuda_like(sim):
    sim(allocator="cuda", budget=8 << 30)
    return sim


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


@pytest.mark.parametrize("powers", [(10, 24), (22.7, 22.8)], ids=["all sizes", "two to a segment"])
def test_what_is_within_the_limit_is_never_refused(cuda_like, powers):
    def draw(numbers):
        return int(2 ** numbers.uniform(*powers))

    with memory_budget("256MiB", "sim"):
        assert sum(churned(seed, 256 * MIB, draw) for seed in range(2)) == 0


# --- other devices


"""The functions of ``torch.mps``."""


def test_a_device_with_too_small_an_index_is_named(sim):
    with pytest.raises(AdaptiveUsageError, match="'sim:1': this machine has 1 of its type"):
        memory_budget(500, "sim:1")


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
