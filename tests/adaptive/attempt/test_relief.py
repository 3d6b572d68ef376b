"""What is given back after an out-of-memory error, so that the same size is worth a second try."""

import gc
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from tenure import NewDisposeScope, statistics
from tenure.adaptive import NoBatchsizeCache, OutOfRetriesError, batch
from tests.shrinking import shrinkables

from .failures import on_sim

MIB = 1 << 20
TEXT = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8.00 GiB"


class FakeAllocator:
    """The memory of a device whose allocator keeps a cache, and which work that fails leaves."""

    def __init__(self, allocated_bytes=0, cached_bytes=0, garbage_bytes=0):
        self.allocated_bytes = allocated_bytes + garbage_bytes
        self.cached_bytes = cached_bytes
        self.garbage_bytes = garbage_bytes
        self.calls = []

    def memory_allocated(self, device):
        return self.allocated_bytes

    def memory_reserved(self, device):
        return self.allocated_bytes + self.cached_bytes

    def mem_get_info(self, device):
        return 3 * MIB, 8 * MIB

    def empty_cache(self):
        self.calls.append("empty_cache")
        self.cached_bytes = 0

    def synchronize(self, device):
        self.calls.append(f"synchronize {device}")
        raise RuntimeError("CUDA error: an asynchronous error that waited")

    def collect(self):
        self.calls.append("collect")
        self.allocated_bytes -= self.garbage_bytes
        self.garbage_bytes = 0


@pytest.fixture
def retries(monkeypatch):
    """What is done after each failure of work that fits at no size."""

    def found(fake, text=TEXT, size=1):
        monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
        monkeypatch.setattr(gc, "collect", fake.collect)
        events = []

        @batch(initial_batchsize=size, cache_type=NoBatchsizeCache, on_retry=events.append)
        def work(size):
            raise RuntimeError(text)

        with pytest.raises(OutOfRetriesError):
            work()
        monkeypatch.undo()
        return [(event.kind, event.freed_bytes) for event in events]

    return found


@pytest.mark.parametrize(
    ("memory", "text", "first"),
    [
        # the cache could have held what was wanted
        ({"allocated_bytes": MIB, "cached_bytes": 2 * MIB}, TEXT, ("retry", 2 * MIB)),
        ({"cached_bytes": MIB}, TEXT, ("shrink", 0)),
        # the error tells, and tensors have died since
        (
            {"cached_bytes": 64 * MIB},
            f"{TEXT}. Of it, 0 bytes is reserved by PyTorch but unallocated.",
            ("shrink", 0),
        ),
        (
            {"cached_bytes": 64 * MIB},
            f"{TEXT}. Of it, 3.50 MiB is reserved by PyTorch but unallocated.",
            ("retry", 64 * MIB),
        ),
        # those outside the allocator tell no bytes
        ({"cached_bytes": MIB}, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", ("retry", MIB)),
        ({"cached_bytes": MIB}, "CUDA driver error: out of memory", ("retry", MIB)),
        # garbage
        ({"allocated_bytes": MIB, "garbage_bytes": 2 * MIB}, TEXT, ("retry", 2 * MIB)),
        ({"garbage_bytes": MIB}, TEXT, ("shrink", 0)),
        # no memory helps
        ({"cached_bytes": 64 * MIB}, "Invalid buffer size: 1.00 MiB", ("shrink", 0)),
    ],
)
def test_the_same_size_is_tried_again_if_enough_came_free(retries, memory, text, first):
    fake = FakeAllocator(**memory)
    events = retries(fake, text, size=2)
    assert events[0] == first
    # each way helps once
    assert [kind for kind, _ in events].count("retry") == (first[0] == "retry")
    assert fake.calls.count("collect") == ("Invalid" not in text)


def test_the_cache_of_mps_is_given_back_too(retries):
    calls = []
    fake = SimpleNamespace(
        current_allocated_memory=lambda: 4 * MIB,
        driver_allocated_memory=lambda: (4 if "empty_cache" in calls else 7) * MIB,
        recommended_max_memory=lambda: 64 * MIB,
        synchronize=lambda: calls.append("synchronize"),
        empty_cache=lambda: calls.append("empty_cache"),
    )
    assert all(hasattr(torch.mps, name) for name in vars(fake))
    fake.collect = lambda: None
    text = "MPS backend out of memory (MPS allocated: 4.00 MB). Tried to allocate 2.00 MB on"
    assert retries(fake, text, size=2)[0] == ("retry", 3 * MIB)
    assert calls[:2] == ["synchronize", "empty_cache"]


def test_garbage_of_the_host_is_collected_before_giving_up(retries, monkeypatch):
    resident = iter([64 * MIB, 16 * MIB])
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(resident)))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 33554432 bytes."
    fake = FakeAllocator()
    events = retries(fake, f"{text} Error code 12", size=2)
    assert events == [("shrink", 0), ("retry", 48 * MIB), ("give_up", 0)]
    assert fake.calls == ["collect"]


def test_workspaces_of_libraries_are_let_go_once_before_giving_up(retries, monkeypatch):
    fake = FakeAllocator(allocated_bytes=3 * MIB)
    fake.is_initialized = lambda: True

    def clear():
        fake.calls.append("clear")
        fake.allocated_bytes -= 2 * MIB

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    # one of another thread, such as pytest-xdist has, may be about to use them
    monkeypatch.setattr(sys, "_current_frames", lambda: {0: sys._getframe()})
    events = retries(fake)
    assert [kind for kind, _ in events] == ["retry", "give_up"]
    assert fake.calls.count("clear") == 1


def kinds_of(work, size):
    events = []
    batch(initial_batchsize=size, cache_type=NoBatchsizeCache, on_retry=events.append)(work)()
    return [event.kind for event in events]


def test_a_cache_cut_up_by_older_tensors_promises_nothing(sim):
    sim(allocator="cuda", budget="100MiB")
    kept = [on_sim(4 * MIB) for _ in range(25)][::5]
    assert kinds_of(lambda size: on_sim(size * 15 * MIB), 2) == ["shrink"]
    del kept


@pytest.mark.sim_allocator("exact")  # CUDA's takes at least 2 MiB
def test_a_retry_makes_no_tensor_that_a_scope_of_the_program_owns(sim):
    sim(budget="1MiB")
    with NewDisposeScope():
        before = statistics().created_in_scope
        assert kinds_of(lambda size: on_sim(size * MIB), 2) == ["shrink"]
        # the result of the attempt that worked
        assert statistics().created_in_scope == before + 1


@pytest.mark.sim_allocator("exact")  # it counts bytes
def test_casts_of_weights_are_let_go_before_giving_up(sim):
    weight = torch.ones(512, 512, device=sim.device, requires_grad=True)
    with torch.autocast("sim", dtype=torch.bfloat16):
        (torch.ones(2, 512, device=sim.device) @ weight).sum()
        sim.budget_bytes = sim.allocated_bytes + 1024
        assert kinds_of(lambda size: on_sim(weight.nbytes // 2), 1) == ["retry"]


# --- pagers and caches that give memory back

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Pager:
    def __init__(self, *gives):
        self.gives = list(gives)
        self.asked = []

    def shrink(self, device, n_bytes):
        self.asked.append((device, n_bytes))
        return self.gives.pop(0) if self.gives else 0


def sizes_of(lender, text=OOM):
    """The sizes that are tried of work that fits at 2 of 4."""
    sizes = []

    @batch(initial_batchsize=4, cache_type=NoBatchsizeCache)
    def work(size):
        sizes.append(size)
        if size > 2:
            raise RuntimeError(text)

    shrinkables.add(lender)
    try:
        work()
    finally:
        shrinkables.discard(lender)
    return sizes


@pytest.mark.parametrize(
    ("text", "given_bytes", "sizes"),
    [
        (OOM, 1 << 30, [4, 2]),
        (OOM, 2 << 30, [4, 4, 2]),
        # nobody knows how much was wanted
        ("CUDA error: out of memory", 1 << 20, [4, 4, 2]),
        # no memory helps
        ("Invalid buffer size: 24.00 GiB", 1 << 20, [4, 2]),
    ],
    ids=["less than was wanted", "as much", "unknown", "a limit of sizes"],
)
def test_a_pager_is_asked_before_the_size_shrinks(text, given_bytes, sizes):
    pager = Pager(given_bytes)
    assert sizes_of(pager, text) == sizes
    wanted = 2 << 30 if text == OOM else None
    n_asked = 0 if "Invalid" in text else len(sizes) - 1
    assert pager.asked == [("cuda", wanted)] * n_asked
    assert pager not in shrinkables.alive()


def test_a_pager_that_fails_is_logged_and_the_size_shrinks(caplog):
    class Broken:
        def shrink(self, device, n_bytes):
            raise ValueError("broken pager")

    assert sizes_of(Broken()) == [4, 2]
    assert "broken pager" in caplog.text
