"""Other accelerators than CUDA, by the modules that torch has for them in every build."""

import contextlib

import pytest
import torch

from tenure.paging import PagingError, PagingWarning, page, plan_paging
from tenure.paging._checks import checked_device
from tenure.paging._host_buffers import Pinning

from .models import mlp


def make_available(monkeypatch, module, **functions):
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    for name, function in functions.items():
        monkeypatch.setattr(module, name, function)


def test_a_device_without_streams_is_refused_with_what_to_do_instead(monkeypatch):
    make_available(monkeypatch, torch.mps)
    for name in ("Stream", "stream", "current_stream"):  # torch 2.15 has them, and no more
        monkeypatch.delattr(torch.mps, name, raising=False)
    with pytest.raises(PagingError) as refused:
        page(mlp(), "mps")
    assert str(refused.value) == (
        "A model can't be paged to 'mps': weights are copied on streams beside the one that "
        "computes, and torch.mps lacks Stream, stream, current_stream, current_device, device. Its "
        "memory is that of the host, where a paged model is anyway: move the model there with "
        "model.to('mps'), or run one that does not fit from a folder: page(model, 'cpu', "
        "host=Path(...))."
    )


def test_any_other_device_without_streams_is_refused(monkeypatch):
    make_available(monkeypatch, torch.mtia, current_device=lambda: 0)
    assert checked_device("mtia") == torch.device("mtia", 0)
    monkeypatch.delattr(torch.mtia, "Event")
    with pytest.raises(PagingError, match=r"torch.mtia lacks Event\. Name another accelerator"):
        plan_paging(mlp(), "mtia")


def test_a_share_of_what_no_device_tells_is_refused(monkeypatch):
    make_available(monkeypatch, torch.mtia, current_device=lambda: 0)
    with pytest.raises(PagingError, match=r"can't tell how much of 'mtia:0' is free.*\"6GiB\"\.$"):
        plan_paging(mlp(), "mtia", budget="80%")


def test_a_plan_is_made_for_an_xpu(monkeypatch):
    free_and_total = (40 << 20, 80 << 20)
    make_available(
        monkeypatch, torch.xpu, current_device=lambda: 0, mem_get_info=lambda _: free_and_total
    )
    monkeypatch.delattr(torch.xpu, "get_per_process_memory_fraction", raising=False)
    plan = plan_paging(mlp(), "xpu", budget="50%")
    assert (plan.device, plan.budget_bytes) == ("xpu:0", 20 << 20)


class Current:
    """Which device is current; by default another than the one that is meant."""

    def __init__(self):
        self.index = 0

    @contextlib.contextmanager
    def device(self, device):
        self.index, before = torch.device(device).index, self.index
        yield
        self.index = before


@pytest.fixture
def current(monkeypatch):
    current = Current()
    monkeypatch.setattr(torch.xpu, "device", current.device)
    return current


def test_memory_for_an_xpu_is_pinned_by_the_allocator_on_that_device(monkeypatch, current):
    assert not hasattr(torch.xpu, "cudart")
    seen = []

    def pin_memory(tensor):
        seen.append((current.index, tensor.nbytes))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pinning = Pinning(torch.device("xpu", 1))
    memory = pinning.memory(64)
    assert seen == [(1, 64)]
    assert bytes(memory) == bytes(64)
    assert pinning.n_bytes == 64
    pinning.undo()
    assert (pinning.n_bytes, current.index) == (0, 0)


def test_an_xpu_that_can_not_pin_is_told_once(monkeypatch, current):
    def pin_memory(tensor):
        raise RuntimeError("UR_RESULT_ERROR_OUT_OF_HOST_MEMORY\nmore")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pinning = Pinning(torch.device("xpu", 1))
    with pytest.warns(PagingWarning, match=r"64 B of .* pinned .UR_RESULT_ERROR_OUT_OF_HOST_MEM"):
        memory = pinning.memory(64)
    assert bytes(memory) == bytes(pinning.memory(64)) == bytes(64)
    assert pinning.n_bytes == 0
