"""What is given back after an out-of-memory error, so that the same size is worth a second try."""

import gc
import types

import pytest
import torch

from tenure import NewDisposeScope, _shrinking
from tenure.adaptive import oom_info
from tenure.adaptive._retry import _relief
from tenure.adaptive._retry._attempts import Attempts
from tenure.adaptive._retry._relief import Relief, Scene, free_bytes_of, scene_of

from .test_attempts import Halving

MIB = 1 << 20


class FakeAllocator:
    """The memory statistics of a device whose allocator keeps a cache."""

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
def allocator(monkeypatch):
    def install(**bytes_of):
        fake = FakeAllocator(**bytes_of)
        monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
        monkeypatch.setattr(_relief, "gc", types.SimpleNamespace(collect=fake.collect))
        return fake

    return install


def error_of(text="CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has ..."):
    return oom_info(RuntimeError(text))


def test_a_cache_that_could_hold_the_request_is_given_back(allocator):
    fake = allocator(allocated_bytes=MIB, cached_bytes=2 * MIB)
    info = error_of()
    assert Relief().make_room(info, scene_of(info), 8) == 2 * MIB
    assert fake.calls == ["synchronize cuda:0", "empty_cache"]


def test_a_cache_that_was_too_small_at_the_error_promises_nothing(allocator):
    fake = allocator(cached_bytes=MIB)
    info = error_of()
    scene = scene_of(info)
    fake.cached_bytes = 64 * MIB  # what the failed attempt has let go
    assert Relief().make_room(info, scene, 8) == 0
    assert fake.calls == ["synchronize cuda:0", "collect"]


@pytest.mark.parametrize(
    "text", ["cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDA driver error: out of memory"]
)
def test_the_cache_makes_room_for_those_outside_the_allocator(allocator, text):
    allocator(cached_bytes=MIB)
    info = error_of(text)
    assert info.kind in ("workspace", "driver")
    assert Relief().make_room(info, scene_of(info), 8) == MIB


def test_the_cache_is_given_back_once_for_a_size(allocator):
    fake = allocator(cached_bytes=2 * MIB)
    info, relief = error_of(), Relief()
    assert relief.make_room(info, scene_of(info), 8)
    fake.cached_bytes = 2 * MIB
    assert relief.make_room(info, scene_of(info), 8) == 0
    assert relief.make_room(info, scene_of(info), 4) == 2 * MIB


def test_garbage_is_collected_once_and_counts_if_it_serves_the_request(allocator):
    fake = allocator(allocated_bytes=MIB, garbage_bytes=2 * MIB)
    info, relief = error_of(), Relief()
    assert relief.make_room(info, Scene(0), 8) == 2 * MIB
    fake.garbage_bytes = 2 * MIB
    assert relief.make_room(info, Scene(0), 8) == 0
    assert fake.calls.count("collect") == 1


def test_garbage_smaller_than_the_request_promises_nothing(allocator):
    allocator(garbage_bytes=MIB)
    assert Relief().make_room(error_of(), Scene(0), 8) == 0


def test_a_size_limit_needs_no_memory(allocator):
    fake = allocator(cached_bytes=64 * MIB, garbage_bytes=64 * MIB)
    info = oom_info(RuntimeError("Invalid buffer size: 1.00 MiB"))
    assert Relief().make_room(info, Scene(64 * MIB), 8) == 0
    assert fake.calls == []


def test_free_memory_is_read_from_the_device_or_the_host(allocator):
    assert free_bytes_of(oom_info(MemoryError())) > 0
    assert free_bytes_of(oom_info(RuntimeError("std::bad_alloc"))) > 0
    allocator()
    assert free_bytes_of(error_of()) == 3 * MIB


class OfOneDevice:
    """What torch has for a device without statistics, of which there is one: MPS."""

    def __init__(self):
        self.calls = []

    def synchronize(self):
        self.calls.append("synchronize")

    def collect(self):
        self.calls.append("collect")


def test_garbage_is_collected_also_where_nothing_tells_what_that_frees(monkeypatch):
    fake = OfOneDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(_relief, "gc", types.SimpleNamespace(collect=fake.collect))
    info, relief = oom_info(RuntimeError("MPS backend out of memory (...)")), Relief()
    for size in (8, 4):
        assert relief.make_room(info, scene_of(info), size) == 0
    assert relief.last_resort(info) == 0
    assert fake.calls == ["synchronize", "collect", "synchronize"]


def test_garbage_is_collected_also_for_a_device_that_torch_does_not_find(monkeypatch):
    calls = []
    monkeypatch.setattr(_relief, "gc", types.SimpleNamespace(collect=lambda: calls.append(1)))
    info, relief = error_of("vega:3 out of memory. Tried to allocate 1.00 MiB"), Relief()
    assert relief.make_room(info, scene_of(info), 8) == relief.make_room(info, scene_of(info), 4)
    assert relief.last_resort(info) == 0
    assert calls == [1]


def test_free_memory_is_what_a_budget_leaves(allocator):
    fake = allocator()
    fake.get_device_properties = lambda device: types.SimpleNamespace(total_memory=8 * MIB)
    fake.get_per_process_memory_fraction = lambda device: 0.125
    fake.set_per_process_memory_fraction = lambda fraction, device: None
    fake.max_memory_allocated = fake.memory_allocated
    fake.reset_peak_memory_stats = lambda device: None
    assert free_bytes_of(error_of()) == MIB
    fake.allocated_bytes = 2 * MIB
    assert free_bytes_of(error_of()) == 0


class Lender:
    """Gives back so much, once."""

    def __init__(self, given_bytes):
        self.given_bytes = given_bytes

    def shrink(self, device, n_bytes):
        given_bytes, self.given_bytes = self.given_bytes, 0
        return given_bytes


@pytest.mark.parametrize(
    ("text", "given_bytes", "promised_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", MIB, 0),
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", 2 * MIB, 2 * MIB),
        ("CUDA error: out of memory", MIB, MIB),
    ],
    ids=["less than was wanted", "as much", "unknown"],
)
def test_less_than_was_wanted_promises_nothing_whoever_gives_it(
    allocator, text, given_bytes, promised_bytes
):
    allocator()
    info, lender = error_of(text), Lender(given_bytes)
    _shrinking.register_shrinkable(lender)
    try:
        assert Relief().make_room(info, Scene(0), 8) == promised_bytes
    finally:
        _shrinking.unregister_shrinkable(lender)
    assert lender.given_bytes == 0


def test_a_device_that_is_not_there_promises_nothing():
    info = oom_info(RuntimeError("vega:3 out of memory. Tried to allocate 1.00 MiB"))
    assert scene_of(info) == Scene(None)
    assert Relief().make_room(info, Scene(None), 8) == 0
    assert free_bytes_of(info) is None


def test_garbage_of_the_host_is_collected_before_giving_up(monkeypatch):
    resident = iter([64 * MIB, 16 * MIB])
    process = types.SimpleNamespace(
        memory_info=lambda: types.SimpleNamespace(rss=next(resident)),
    )
    monkeypatch.setattr(_relief.psutil, "Process", lambda: process)
    info = oom_info(
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 33554432 bytes. Error code 12"
        )
    )
    relief = Relief()
    assert relief.make_room(info, Scene(None), 1) == 0
    assert relief.last_resort(info) == 48 * MIB
    assert relief.last_resort(info) == 0


def test_older_cycles_on_the_device_are_collected_before_the_size_shrinks(sim):
    class Cycle:
        def __init__(self):
            self.me = self
            self.tensor = torch.empty(600, dtype=torch.uint8, device="sim")

    gc.collect()
    gc.disable()
    try:
        Cycle()
        sim.budget_bytes = 1000
        with NewDisposeScope("test") as scope:
            size = Attempts("work", scope).run(
                Halving(500),
                lambda size: torch.empty(size, dtype=torch.uint8, device="sim").numel(),
            )
    finally:
        gc.enable()
    assert size == 500
