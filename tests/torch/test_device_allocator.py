"""Blocks that torch keeps for cuBLAS go only where no graph and no thread uses them; segments."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from tenure._torch import device_allocator
from tenure._torch.device_allocator import (
    clear_workspaces,
    free_block_bytes,
    segments_of,
    workspace_bytes,
)

CUDA = torch.device("cuda:0")
SECOND = torch.device("cuda", 1)
BLOCK_BYTES = 8_519_680


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
    names = {
        "_cuda_clearCublasWorkspaces": lambda: setattr(fake, "held_bytes", 0),
        "_cuda_getCublasWorkspaceSize": lambda: BLOCK_BYTES,
        "_cuda_getCublasLtWorkspaceSize": lambda: 1 << 20,
    }
    for name, function in names.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
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
    assert workspace_bytes(CUDA) == {"cuBLAS": BLOCK_BYTES, "cuBLASLt": 1 << 20}


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


def test_the_self_test_finds_the_names_of_a_build_with_cuda(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert device_allocator.works()
    monkeypatch.delattr(torch._C, "_cuda_getCublasLtWorkspaceSize")
    assert not device_allocator.works()


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
