"""A limit that the allocator keeps: its fraction is lowered, never raised, and always restored."""

import threading
from types import SimpleNamespace

import pytest
import torch

from tenure.adaptive import AdaptiveUsageError, memory_budget

TOTAL_BYTES = 10_000


class FakeDevice:
    """As much of ``torch.cuda`` as a budget uses; one device of 10,000 bytes."""

    def __init__(self):
        self.fraction = 0.75
        self.allocated_bytes = self.peak_bytes = 0
        self.n_emptied = 0

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=TOTAL_BYTES)

    def get_per_process_memory_fraction(self, device):
        return self.fraction

    def set_per_process_memory_fraction(self, fraction, device):
        assert 0 <= fraction <= 1
        self.fraction = fraction

    def memory_allocated(self, device):
        return self.allocated_bytes

    def max_memory_allocated(self, device):
        return self.peak_bytes

    def reset_peak_memory_stats(self, device):
        self.peak_bytes = self.allocated_bytes

    def empty_cache(self):
        self.n_emptied += 1

    def allocate(self, n_bytes):
        if self.allocated_bytes + n_bytes > round(self.fraction * TOTAL_BYTES):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.allocated_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def free(self, n_bytes):
        self.allocated_bytes -= n_bytes


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def test_the_block_may_allocate_its_limit_beside_what_was_there(device):
    device.allocate(2000)
    with memory_budget(1000, "cuda") as budget:
        device.allocate(1000)
        with pytest.raises(torch.OutOfMemoryError):
            device.allocate(1)
        device.free(400)
        assert (budget.live_bytes, budget.peak_bytes) == (600, 1000)
    assert device.fraction == 0.75
    device.free(600)
    assert repr(budget) == "<memory_budget 1000 B on cuda:0, closed, 600 B live, 1000 B peak>"


def test_a_limit_above_the_fraction_of_the_program_changes_nothing(device):
    with memory_budget(9000, "cuda:0"):
        assert device.fraction == 0.75
    assert device.fraction == 0.75


def test_the_strictest_of_nested_budgets_holds_and_each_has_its_own_peak(device):
    with memory_budget(1000, "cuda") as outer:
        device.allocate(800)
        device.free(600)
        with memory_budget(5000, "cuda") as inner:
            device.allocate(700)
            with pytest.raises(torch.OutOfMemoryError):
                device.allocate(101)
            device.free(700)
        with memory_budget(100, "cuda"), pytest.raises(torch.OutOfMemoryError):
            device.allocate(101)
        device.allocate(800)
    assert (outer.peak_bytes, inner.peak_bytes) == (1000, 700)
    assert device.fraction == 0.75


def test_budgets_of_a_process_may_end_in_any_order(device):
    first, second = memory_budget(1000, "cuda"), memory_budget(500, "cuda")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert device.fraction == 0.05
    second.__exit__(None, None, None)
    assert device.fraction == 0.75


def test_what_was_there_before_the_block_is_no_use_and_no_peak_of_it(device):
    device.allocate(2000)
    budget = memory_budget(1000, "cuda")
    assert (budget.live_bytes, budget.peak_bytes) == (0, 0)
    with budget:
        device.allocate(300)
    assert (budget.live_bytes, budget.peak_bytes) == (300, 300)


def test_an_exception_restores_the_fraction(device):
    with pytest.raises(KeyError), memory_budget(500, "cuda"):
        raise KeyError
    assert device.fraction == 0.75


def test_another_thread_cannot_end_the_limit(device):
    errors = []

    def work(budget):
        try:
            budget.__exit__(None, None, None)
        except AdaptiveUsageError as error:
            errors.append(str(error))

    with memory_budget(500, "cuda") as budget:
        thread = threading.Thread(target=work, args=(budget,))
        thread.start()
        thread.join()
        assert device.fraction == 0.05
    assert "stays open" in errors[0]


class DeviceWithoutAnIndex:
    """What torch has for a kind of device of which a machine has one at the most: MPS."""

    def __init__(self, n_devices):
        self.device_count = lambda: n_devices
        self.is_available = lambda: n_devices > 0


def test_a_device_that_is_the_only_one_of_its_kind_has_index_0(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: DeviceWithoutAnIndex(1))
    assert memory_budget(500, "mps").device == torch.device("mps:0")
    monkeypatch.setattr(torch, "get_device_module", lambda device: DeviceWithoutAnIndex(0))
    with pytest.raises(
        AdaptiveUsageError, match="'mps': this machine, or this build of torch, has"
    ):
        memory_budget(500, "mps")


def test_a_device_with_too_small_an_index_is_named(device):
    with pytest.raises(AdaptiveUsageError, match="'cuda:1': this machine has 1 of its type"):
        memory_budget(500, "cuda:1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_of_cuda_refuses_what_is_past_the_limit():
    before = torch.cuda.get_per_process_memory_fraction()
    with memory_budget("256MiB", "cuda") as budget:
        kept = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(160 << 20, dtype=torch.uint8, device="cuda")
        assert budget.live_bytes == kept.nbytes
    assert torch.cuda.get_per_process_memory_fraction() == before
