"""Reports of devices with a caching allocator: its free blocks, and what libraries took of it."""

import gc
import types

import pytest
import torch

from tenure.profiler import MemReporter, snapshot
from tests.testing.machine import library_pool

MIB = 1 << 20
WORKSPACE = 8_519_680  # what torch takes for cuBLAS by default


def block(size, state="active_allocated", requested=None):
    return {"size": size, "state": state, "requested_size": requested or size, "address": 0}


def segment(*blocks, device=0):
    return {"device": device, "blocks": list(blocks)}


@pytest.fixture
def backend(monkeypatch):
    """A backend whose module has what a test gives it; returns the report of its device."""

    def install(kind="cuda", **functions):
        module = types.SimpleNamespace(device_count=lambda: 1, **functions)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        (found,) = MemReporter().get_stats(device=f"{kind}:0").devices
        return found

    return install


@pytest.fixture
def cublas(monkeypatch):
    """A torch that keeps one block for each handle of cuBLAS, and one of cuBLASLt."""
    sizes = {"cuBLAS": WORKSPACE, "cuBLASLt": MIB}
    # no public name says what a library that is not here takes
    monkeypatch.setattr("tenure.profiler._allocator.workspace_bytes", lambda device: sizes)


def refusing(*_):
    raise RuntimeError("not on this backend")


STATS = {
    "allocated_bytes.all.current": 1536,
    "requested_bytes.all.current": 1100,
    "reserved_bytes.all.current": 4096,
}


def test_what_a_backend_tells_is_in_its_report(backend):
    found = backend(memory_stats=lambda device: STATS, mem_get_info=lambda device: (1000, 9000))
    assert found.is_counted
    assert (found.total_bytes, found.reserved_bytes, found.device_used_bytes) == (1536, 4096, 8000)
    assert found.categories["allocator rounding"] == 1536 - 1100
    # one number alone
    found = backend(memory_stats=refusing, memory_allocated=lambda device: 512)
    assert (found.total_bytes, found.reserved_bytes, found.device_used_bytes) == (512, 512, None)
    assert found.categories["allocator rounding"] == 0


def test_a_backend_that_is_not_in_use_is_not_brought_to_life(backend):
    found = backend(
        is_initialized=lambda: False,
        memory_stats=lambda device: {},
        memory_allocated=lambda device: 0,
        mem_get_info=lambda device: pytest.fail("a context came to life"),
    )
    assert (found.total_bytes, found.reserved_bytes, found.device_used_bytes) == (0, 0, None)


def test_free_blocks_are_told_apart_by_what_lies_beside_them(backend):
    segments = [
        segment(block(MIB), block(3 * MIB, "inactive"), block(512), block(2 * MIB, "inactive")),
        segment(block(20 * MIB, "inactive")),
        segment(block(4 * MIB, "active_pending_free"), block(MIB, "inactive")),
        segment(block(90 * MIB, "inactive"), device=1),
    ]
    found = backend(memory_stats=lambda device: STATS, memory_snapshot=lambda: segments)
    assert (found.largest_free_bytes, found.inactive_split_bytes) == (20 * MIB, 6 * MIB)
    # CUDA is not in use, and no library of it
    assert "library workspaces" not in found.categories


@pytest.mark.parametrize("entries", [(), ({"device": 0},)])
def test_an_allocator_that_tells_of_no_blocks_is_not_asked_further(backend, cublas, entries):
    found = backend(memory_stats=lambda device: STATS, memory_snapshot=lambda: list(entries))
    assert (found.largest_free_bytes, found.inactive_split_bytes) == (None, None)
    assert "library workspaces" not in found.categories


def test_free_blocks_of_the_size_of_a_workspace_are_none(backend, cublas):
    blocks = [*[block(WORKSPACE)] * 2, block(WORKSPACE, "inactive"), block(MIB), block(77)]
    found = backend(memory_stats=lambda device: STATS, memory_snapshot=lambda: [segment(*blocks)])
    assert found.categories["library workspaces"] == 2 * WORKSPACE + MIB


def test_a_report_names_workspaces_and_still_adds_up(sim, cublas):
    sim(allocator="cuda")
    gc.collect()
    kept = torch.ones(3 * MIB, device=sim.device)
    pool = library_pool()
    taken = [pool.allocate(n_bytes, 0.0) for n_bytes in (WORKSPACE, WORKSPACE, 1000)]
    report = MemReporter().report(device=sim.device)
    seen = snapshot().report.devices
    for each in taken:
        pool.free(each)
    assert report.categories["library workspaces"] == 2 * WORKSPACE
    assert report.unexplained_bytes == 1000
    assert report.total_bytes == sum(report.categories.values()) + 1000
    assert report.total_bytes == kept.nbytes + 2 * WORKSPACE + 1024
    assert seen[[d.device for d in seen].index("sim:0")].categories == report.categories


def test_a_report_says_what_is_reserved_and_how_it_is_cut(sim):
    sim(allocator="cuda")
    gc.collect()
    blocks = [torch.ones(MIB, device=sim.device) for _ in range(5)]  # of 4 MiB, in 20
    gone = torch.ones(8 * MIB, device=sim.device)  # a segment of its own
    del blocks[1::2], gone
    report = MemReporter().report(device=sim.device)
    (device,) = report.devices
    assert device.total_bytes == 12 * MIB
    assert device.reserved_bytes == 52 * MIB
    assert device.largest_free_bytes == 32 * MIB
    assert device.inactive_split_bytes == 8 * MIB
    assert device.reserved_bytes == sim.module.memory_reserved()
    assert (
        "The allocated memory on sim:0: 12.0 MiB, of 52.0 MiB that the allocator has reserved.\n"
        "Free of that: 40.0 MiB, the largest block 32.0 MiB; beside blocks in use, where "
        "empty_cache() can't reach it: 8.0 MiB."
    ) in report.text(width=300)
    told = report.to_dict()["devices"][0]
    assert (told["largest_free_bytes"], told["inactive_split_bytes"]) == (32 * MIB, 8 * MIB)
    sim.module.empty_cache()
    assert sim.module.memory_reserved() == 20 * MIB  # 8 of them are those beside blocks in use
