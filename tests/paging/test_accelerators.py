"""Other accelerators than CUDA, by the modules that torch has for them in every build."""

import pytest
import torch

from tenure.paging import PagingError, page, plan_paging

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
