"""The same promises on a real device, read off the counters of its allocator."""

import gc

import pytest
import torch
from torch import nn

from tenure.profiler import AwayTensorError, Courtesy, CourtesyError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def device():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.device("cuda", torch.cuda.current_device())


def test_the_device_is_free_inside_and_a_graph_runs_backward_afterwards(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 1)).to(device)
    x = torch.randn(64, 256, device=device)
    loss = model(x).pow(2).sum()
    loss.backward(retain_graph=True)
    expected = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    resting_bytes = torch.cuda.memory_allocated(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    with Courtesy(device) as courtesy:
        assert not courtesy.report.stays, str(courtesy.report)
        # what is left are workspaces of cuBLAS, which no tensor has
        assert torch.cuda.memory_allocated(device) <= resting_bytes - courtesy.away_bytes
        assert torch.cuda.memory_reserved(device) < reserved_bytes
    assert torch.cuda.memory_allocated(device) == resting_bytes
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_what_passes_python_by_is_trapped_meanwhile(device):
    x = torch.ones(4, device=device)
    with Courtesy(device):
        with pytest.raises(AwayTensorError):
            x + 1
        with pytest.raises(RuntimeError, match="its bytes are in host memory"):
            torch.utils.dlpack.to_dlpack(x)
    assert (x + 1).tolist() == [2, 2, 2, 2]


def test_a_captured_graph_keeps_its_memory(device):
    x = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    with pytest.raises(CourtesyError, match="A live CUDAGraph replays"):
        Courtesy(device).yield_memory()
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [6, 6, 6, 6]
