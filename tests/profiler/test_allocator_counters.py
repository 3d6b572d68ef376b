"""The counters of a device: what a backend tells is used, what it does not is no error."""

import types

import pytest
import torch

from tenure.profiler._allocator import AllocatorBytes, allocator_bytes

DEVICE = torch.device("cuda:0")


@pytest.fixture
def backend(monkeypatch):
    """A backend whose module has what a test gives it."""

    def install(**functions):
        module = types.SimpleNamespace(**functions)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    return install


def refusing(*_):
    raise RuntimeError("not on this backend")


STATS = {
    "allocated_bytes.all.current": 1536,
    "requested_bytes.all.current": 1100,
    "reserved_bytes.all.current": 4096,
}


def test_everything_that_a_backend_tells(backend):
    backend(memory_stats=lambda device: STATS, mem_get_info=lambda device: (1000, 9000))
    assert allocator_bytes(DEVICE) == AllocatorBytes(1536, 1100, 4096, 8000)


def test_a_backend_that_does_not_know_what_was_asked_for(backend):
    backend(memory_stats=lambda device: {"allocated_bytes.all.current": 1536})
    assert allocator_bytes(DEVICE) == AllocatorBytes(1536, 1536, 1536, None)


def test_a_backend_that_has_the_count_of_what_was_asked_for_and_never_counts(backend):
    backend(memory_stats=lambda device: STATS | {"requested_bytes.all.current": 0})
    assert allocator_bytes(DEVICE) == AllocatorBytes(1536, 1536, 4096, None)


@pytest.mark.parametrize("stats", [refusing, lambda device: {}])
def test_a_backend_that_counts_what_is_allocated_alone(backend, stats):
    backend(memory_stats=stats, memory_allocated=lambda device: 512)
    assert allocator_bytes(DEVICE) == AllocatorBytes(512, 512, 512, None)


def test_a_backend_with_one_device_and_one_count(backend):
    backend(current_allocated_memory=lambda: 256)
    assert allocator_bytes(torch.device("mps")) == AllocatorBytes(256, 256, 256, None)


def test_the_driver_is_not_asked_for_a_device_that_is_not_in_use(backend):
    backend(
        is_initialized=lambda: False,
        memory_stats=lambda device: {},
        memory_allocated=lambda device: 0,
        mem_get_info=lambda device: pytest.fail("a context came to life"),
    )
    assert allocator_bytes(DEVICE) == AllocatorBytes(0, 0, 0, None)


@pytest.mark.parametrize(
    "functions", [{}, {"memory_stats": refusing, "memory_allocated": refusing}]
)
def test_a_backend_that_tells_nothing(backend, functions):
    backend(**functions)
    assert allocator_bytes(DEVICE) is None


def test_a_device_without_a_module(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", refusing)
    assert allocator_bytes(DEVICE) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_allocator_is_asked_where_torch_keeps_no_count(device):
    assert allocator_bytes(torch.device(device)) is None


@pytest.mark.parametrize(("allocator", "used_bytes"), [("exact", 512), ("cuda", 2 << 20)])
def test_the_simulated_device_is_read_like_any_other(sim, allocator, used_bytes):
    sim(allocator=allocator, round_to_bytes=512, budget="4MiB")
    kept = torch.ones(3, device=sim.device)
    found = allocator_bytes(sim.device)
    assert (found.allocated, found.requested, found.device_used) == (512, 12, used_bytes)
    assert kept.nbytes == 12
