"""Blocks that torch keeps for cuBLAS go only where no graph and no thread uses them; segments."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from tenure import MissingTorchNameError
from tenure._torch import bound, device_allocator
from tenure._torch.device_allocator import (
    clear_workspaces,
    free_block_bytes,
    has_expandable_segments,
    segments_of,
    workspace_bytes,
)

CUDA = torch.device("cuda:0")
SECOND = torch.device("cuda", 1)
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


def test_the_blocks_are_let_go_and_what_that_frees_is_told(cuda):
    assert clear_workspaces(CUDA) == 2 * BLOCK_BYTES
    assert clear_workspaces(CUDA) == cuda.held_bytes == 0


def test_the_size_of_a_block_is_told_by_library(cuda):
    assert workspace_bytes(CUDA) == {"cuBLAS": BLOCK_BYTES, "cuBLASLt": MIB}


def test_a_capture_keeps_the_blocks(cuda):
    cuda.capturing = True
    assert clear_workspaces(CUDA) == 0
    assert cuda.held_bytes


def test_a_graph_that_is_alive_keeps_the_blocks_that_it_may_use(cuda):
    graph = cuda.CUDAGraph()
    assert clear_workspaces(CUDA) == 0
    del graph
    assert clear_workspaces(CUDA)


def test_another_thread_keeps_the_blocks_that_it_may_be_about_to_use(cuda):
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert clear_workspaces(CUDA) == 0
    finally:
        end.set()
        thread.join()
    assert clear_workspaces(CUDA)


@pytest.mark.parametrize("device", ["cpu", "xpu:0", "mps:0"])
def test_other_devices_keep_no_blocks(cuda, device):
    assert clear_workspaces(torch.device(device)) == 0
    assert workspace_bytes(torch.device(device)) == {}
    assert cuda.held_bytes


def test_no_context_is_brought_to_life_by_asking(cuda):
    cuda.initialized = False
    assert clear_workspaces(CUDA) == 0
    assert workspace_bytes(CUDA) == {}
    assert cuda.held_bytes


def test_a_build_without_the_names_keeps_no_blocks(cuda, monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    assert clear_workspaces(CUDA) == 0
    assert workspace_bytes(CUDA) == {}


def test_a_build_with_cuda_that_lost_a_name_says_which(cuda, monkeypatch):
    monkeypatch.setattr(device_allocator, "_cublaslt_bytes", bound("torch._C._gone", "this test"))
    with pytest.raises(MissingTorchNameError, match=r"has no torch\._C\._gone, "):
        workspace_bytes(CUDA)


@pytest.mark.parametrize(
    ("version", "capability", "environment", "expected"),
    [
        ("2.10.0+cu128", (8, 0), {}, {"cuBLAS": BLOCK_BYTES, "cuBLASLt": MIB}),
        ("2.11.0", (9, 0), {}, {"cuBLAS": 32 * MIB}),
        ("2.11.0", (10, 0), {}, {"cuBLAS": BLOCK_BYTES}),
        ("2.12.1", (12, 0), {}, {"cuBLAS": 32 * MIB}),
        ("2.12.1", (8, 9), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {"cuBLAS": 128 << 10}),
        ("2.12.1", (8, 9), {"CUBLAS_WORKSPACE_CONFIG": "16"}, {"cuBLAS": BLOCK_BYTES}),
        ("2.12.1", (8, 9), {"CUBLAS_WORKSPACE_CONFIG": ":4:2:1:3"}, {"cuBLAS": 11 << 10}),
        ("2.11.0", (8, 9), {"CUBLAS_WORKSPACE_CONFIG": ":4:2:1:3:9:1"}, {"cuBLAS": 20 << 10}),
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


def test_an_older_torch_for_amd_refuses_by_name(cuda, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+rocm7.0"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(device_allocator, "_cublas_bytes", bound("torch._C._gone", "this test"))
    with pytest.raises(MissingTorchNameError, match="has no torch"):
        workspace_bytes(CUDA)


@pytest.mark.parametrize("is_expandable", [True, False])
def test_how_segments_are_is_known_to_each_torch(monkeypatch, is_expandable):
    found = {"segments": [], "allocator_settings": {"expandable_segments": is_expandable}}
    settings = f"max_split_size_mb:100, expandable_segments: {is_expandable}"
    name = "_accelerator_getAllocatorSettings"
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch._C, name, lambda: settings, raising=False)
    assert has_expandable_segments() is is_expandable
    # torch 2.11
    monkeypatch.delattr(torch._C, name)
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda pool: found, raising=False)
    assert has_expandable_segments() is is_expandable
    # and its build without CUDA
    monkeypatch.delattr(torch._C, "_cuda_memorySnapshot")
    assert not has_expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert has_expandable_segments() is is_expandable


def _segment(pool, *blocks, index=1):
    made = [{"size": size, "state": state} for size, state in blocks]
    return {"device": index, "segment_pool_id": pool, "blocks": made}


def test_the_free_blocks_of_a_graphs_own_pool_serve_no_other_tensor():
    shared = _segment((0, 0), (512, "inactive"), (1024, "active_allocated"))
    private = _segment((0, 1), (4096, "inactive"))
    assert free_block_bytes([shared, private]) == [512]


def test_segments_are_those_of_the_device_that_is_asked_for():
    here, there = _segment((0, 0)), _segment((0, 0), index=0)
    module = SimpleNamespace(memory_snapshot=lambda: [there, here])
    assert segments_of(module, SECOND) == [here]
    assert segments_of(SimpleNamespace(), SECOND) == []
