"""Allocations, storages, traps and workspaces: what tenure relies on and torch doesn't promise.

Private names are asked, because reports and models show nothing of one event, range or trap.
"""

import gc
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from tenure._torch import allocations, cpu_allocator, device_allocator, trap
from tenure._torch.device_allocator import (
    clear_workspaces,
    free_block_bytes,
    has_expandable_segments,
    workspace_bytes,
)
from tenure._torch.storages import byte_range, key_of
from tenure.profiler import Courtesy

# --- events and counters of allocations


def test_events_of_several_threads_are_put_in_the_order_of_time():
    class Event:
        def __init__(self, at_us, n_bytes):
            self.start_us = lambda: at_us
            self.cpu_memory_usage = lambda: 0
            self.cuda_memory_usage = lambda: n_bytes

    lists = [[Event(1, 10), Event(4, -10)], [Event(2, 20), Event(3, -20)]]
    assert allocations._changes(lists).cuda == [10, 20, -20, -10]


@pytest.mark.parametrize("way", ["reported", "named"])
def test_events_are_of_blocks_and_turns_and_a_mark_among_them_is_no_memory(way, monkeypatch):
    if way == "named":
        monkeypatch.setattr(allocations, "_report", lambda: None)
    cpu_allocator.keep_sizes()
    allocations.begin()
    before = cpu_allocator.live_bytes()
    kept = torch.empty(64, dtype=torch.uint8, device="cpu")
    torch.UntypedStorage(32, device="cpu")
    first = allocations.turn()
    allocations.marker()(3)
    kept.add_(kept)  # an operation is no allocation
    allocations.marker()(2**20)
    after = cpu_allocator.live_bytes()
    del kept
    second = allocations.end()
    cpu_allocator.keep_sizes_as_before()
    assert first == ([64, 32, -32], [])
    assert second == ([allocations.as_event(3), allocations.as_event(2**20), -64], [])
    assert after - before == 64
    assert not allocations.is_profiling()


# --- which bytes of a storage a tensor shows

BASE = torch.arange(24, dtype=torch.int32).view(4, 6)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (BASE, (0, 96)),
        (BASE[1:3], (24, 72)),
        (BASE[:, 1], (4, 80)),
        (BASE[1].expand(5, 6), (24, 48)),
        (BASE[2, 3], (60, 64)),
        (BASE.view(torch.uint8)[0, 3:5], (3, 5)),
    ],
)
def test_a_range_goes_from_the_first_element_to_the_end_of_the_last(tensor, expected):
    assert byte_range(tensor) == expected


# --- traps for storages whose bytes are elsewhere


@pytest.fixture
def traps(monkeypatch):
    """A torch with traps: what is armed, and every call."""
    gc.collect()  # a Courtesy moves earlier tests' garbage as well
    armed, calls = {}, []

    def arm(key, message):
        armed[key] = message
        calls.append("arm")

    def disarm(key):
        del armed[key]
        calls.append("disarm")

    monkeypatch.setattr(trap._SET, arm, raising=False)
    monkeypatch.setattr(trap._CLEAR, disarm, raising=False)
    monkeypatch.setattr(trap, "works", lambda: True)
    return armed, calls


def test_a_storage_is_trapped_while_it_is_away_and_when_a_restore_had_no_room(sim, traps):
    armed, calls = traps
    x = torch.ones(4, device=sim.device)
    key = key_of(x.untyped_storage())
    courtesy = Courtesy()
    courtesy.yield_memory()
    assert armed == {
        key: "16 B on sim:0: its bytes are in host memory: leave the block of tenure's "
        "Courtesy, or call its restore()."
    }
    sim.fail_at(1)
    with pytest.raises(RuntimeError, match="no memory"):
        courtesy.restore()
    assert calls == ["arm", "disarm", "arm"]
    assert [*armed] == [key]
    courtesy.restore()
    assert (armed, x.tolist()) == ({}, [1.0] * 4)


# --- blocks for cuBLAS, which go only where no graph and no thread uses them; segments

CUDA = torch.device("cuda:0")
MIB = 1 << 20
BLOCK_BYTES = 8_519_680
_OF_WORKSPACES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
)  # fmt: skip


class FakeCuda(SimpleNamespace):
    """What is asked of ``torch.cuda``; two blocks are held, of two threads or streams."""

    class CUDAGraph:
        pass

    def __init__(self):
        super().__init__(initialized=True, capturing=False, held_bytes=2 * BLOCK_BYTES)

    def is_initialized(self):
        return self.initialized

    def is_current_stream_capturing(self):
        return self.capturing

    def memory_allocated(self, device):
        return 1000 + self.held_bytes


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: setattr(fake, "held_bytes", 0), raising=False)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    monkeypatch.setattr(device_allocator, "_cublas_bytes", lambda: BLOCK_BYTES)
    monkeypatch.setattr(device_allocator, "_cublaslt_bytes", lambda: MIB)
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    frames = sys._current_frames
    of_the_runner = set(frames()) - {threading.get_ident()}  # pytest-xdist has a thread of its own

    def mine():
        return {one: frame for one, frame in frames().items() if one not in of_the_runner}

    monkeypatch.setattr(sys, "_current_frames", mine)
    return fake


def test_the_blocks_go_only_where_no_graph_and_no_thread_may_use_them(cuda):
    assert workspace_bytes(CUDA) == {"cuBLAS": BLOCK_BYTES, "cuBLASLt": MIB}
    assert workspace_bytes(torch.device("cpu")) == {}
    assert clear_workspaces(torch.device("cpu")) == 0
    cuda.capturing = True
    assert clear_workspaces(CUDA) == 0
    cuda.capturing = False
    graph = cuda.CUDAGraph()
    assert clear_workspaces(CUDA) == 0
    del graph
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert clear_workspaces(CUDA) == 0
    finally:
        end.set()
        thread.join()
    # nothing is brought to life by asking
    cuda.initialized = False
    assert clear_workspaces(CUDA) == 0
    assert workspace_bytes(CUDA) == {}
    assert cuda.held_bytes
    cuda.initialized = True
    assert clear_workspaces(CUDA) == 2 * BLOCK_BYTES
    assert clear_workspaces(CUDA) == cuda.held_bytes == 0


@pytest.mark.parametrize(
    ("version", "capability", "environment", "expected"),
    [
        ("2.10.0+cu128", (8, 0), {}, {"cuBLAS": BLOCK_BYTES, "cuBLASLt": MIB}),
        ("2.11.0", (9, 0), {}, {"cuBLAS": 32 * MIB}),
        ("2.12.1", (8, 9), {"CUBLAS_WORKSPACE_CONFIG": ":4:2:1:3"}, {"cuBLAS": 11 << 10}),
        ("2.10.0", (8, 9), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, {"cuBLAS": BLOCK_BYTES}),
        (
            "2.11.0", (8, 9),
            {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "2048"},
            {"cuBLAS": BLOCK_BYTES, "cuBLASLt": 2 * MIB},
        ),
    ],
)  # fmt: skip
def test_a_torch_that_does_not_tell_the_sizes_has_those_of_its_environment(
    cuda, monkeypatch, version, capability, environment, expected
):
    for name in _OF_WORKSPACES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.version, "hip", None)
    cuda.get_device_capability = lambda device: capability
    assert workspace_bytes(CUDA) == expected


@pytest.mark.parametrize("is_expandable", [True, False])
def test_how_segments_are_is_known_to_each_torch(monkeypatch, is_expandable):
    settings = f"max_split_size_mb:100, expandable_segments: {is_expandable}"
    name = "_accelerator_getAllocatorSettings"
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch._C, name, lambda: settings, raising=False)
    assert has_expandable_segments() is is_expandable
    # torch 2.11
    monkeypatch.delattr(torch._C, name)
    found = {"segments": [], "allocator_settings": {"expandable_segments": is_expandable}}
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda pool: found, raising=False)
    assert has_expandable_segments() is is_expandable


def _segment(pool, *blocks):
    blocks = [{"size": size, "state": state} for size, state in blocks]
    return {"device": 1, "segment_pool_id": pool, "blocks": blocks}


def test_the_free_blocks_of_a_graphs_own_pool_serve_no_other_tensor():
    shared = _segment((0, 0), (512, "inactive"), (1024, "active_allocated"))
    private = _segment((0, 1), (4096, "inactive"))
    assert free_block_bytes([shared, private]) == [512]
