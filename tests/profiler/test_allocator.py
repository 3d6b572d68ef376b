"""Reports of devices with a caching allocator: its free blocks, and what libraries took of it."""

import gc
import types

import pytest
import torch

from tenure.profiler import MemReporter, _allocator, snapshot
from tenure.profiler._allocator import (
    AllocatorBytes,
    CachedMemory,
    allocator_bytes,
    bytes_of_workspaces,
    cached_memory,
)

CUDA = torch.device("cuda:0")
MIB = 1 << 20
WORKSPACE = 8_519_680  # what torch takes for cuBLAS by default


def block(size, state="active_allocated", requested=None):
    return {"size": size, "state": state, "requested_size": requested or size, "address": 0}


def segment(*blocks, device=0):
    return {"device": device, "blocks": list(blocks)}


@pytest.fixture
def tells(monkeypatch):
    """A backend whose allocator tells of these segments."""

    def install(*segments):
        module = types.SimpleNamespace(
            memory_snapshot=lambda: list(segments),
            is_initialized=lambda: False,  # a torch with CUDA asks before it counts workspaces
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    return install


@pytest.fixture
def cublas(monkeypatch):
    """A torch that keeps one block for each handle of cuBLAS, and one of cuBLASLt."""
    sizes = {"cuBLAS": WORKSPACE, "cuBLASLt": MIB}
    monkeypatch.setattr(_allocator, "workspace_bytes", lambda device: sizes)


def test_free_blocks_are_told_apart_by_what_lies_beside_them(tells):
    tells(
        segment(block(MIB), block(3 * MIB, "inactive"), block(512), block(2 * MIB, "inactive")),
        segment(block(20 * MIB, "inactive")),
        segment(block(4 * MIB, "active_pending_free"), block(MIB, "inactive")),
        segment(block(90 * MIB, "inactive"), device=1),
    )
    found = cached_memory(CUDA)
    assert (found.largest_free_bytes, found.inactive_split_bytes) == (20 * MIB, 6 * MIB)
    assert found.n_blocks_in_use == {MIB: 1, 512: 1}


@pytest.mark.parametrize("entries", [(), ({"device": 0},)])
def test_an_allocator_that_tells_of_no_blocks_is_not_asked_further(tells, entries):
    tells(*entries)
    assert cached_memory(CUDA) is None
    assert bytes_of_workspaces(CUDA, None, []) is None


def test_blocks_of_a_workspace_that_tensors_have_are_theirs(tells, cublas):
    tells(segment(*[block(WORKSPACE)] * 3, block(MIB), block(77)))
    found = cached_memory(CUDA)
    assert bytes_of_workspaces(CUDA, found, [WORKSPACE, 77]) == 2 * WORKSPACE + MIB
    assert bytes_of_workspaces(CUDA, found, [WORKSPACE] * 9 + [MIB]) == 0


def test_where_no_library_takes_of_the_allocator_there_is_no_category(tells):
    tells(segment(block(WORKSPACE)))
    assert bytes_of_workspaces(torch.device("xpu:0"), cached_memory(CUDA), []) is None
    assert bytes_of_workspaces(CUDA, CachedMemory(0, 0, {}), []) is None  # CUDA is not in use


def test_a_report_names_workspaces_and_still_adds_up(sim, cublas):
    from tenure.testing._device._machine import machine

    sim(allocator="cuda")
    gc.collect()
    kept = torch.ones(3 * MIB, device=sim.device)
    pool = machine.devices[0].pool
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


# --- backends with other functions than CUDA's, as their modules are in torch 2.13


def as_mps():
    return types.SimpleNamespace(
        device_count=lambda: 1,
        current_allocated_memory=lambda: 700,
        driver_allocated_memory=lambda: 4096,
        recommended_max_memory=lambda: 1 << 30,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        is_available=lambda: True,
    )


def as_xpu():
    stats = {"allocated_bytes.all.current": 700, "reserved_bytes.all.current": 4096}

    def without_a_driver(device):
        raise RuntimeError("The device doesn't support querying the available free memory.")

    return types.SimpleNamespace(
        device_count=lambda: 1,
        current_device=lambda: 0,
        memory_stats=lambda device: stats,
        mem_get_info=without_a_driver,
        memory_snapshot=lambda mempool_id=None: [],
        is_initialized=lambda: True,
    )


@pytest.mark.parametrize(("kind", "module"), [("mps", as_mps()), ("xpu", as_xpu())])
def test_what_a_backend_lacks_is_left_out_of_the_report(monkeypatch, kind, module):
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device(kind, 0)
    assert allocator_bytes(device) == AllocatorBytes(700, 700, 4096, None)
    report = MemReporter().get_stats(device=kind)
    (found,) = report.devices
    assert (found.device, found.total_bytes, found.reserved_bytes) == (f"{kind}:0", 700, 4096)
    assert found.largest_free_bytes is None
    assert "library workspaces" not in found.categories
    assert "of 4.0 KiB that the allocator has reserved" in report.text(width=132)
