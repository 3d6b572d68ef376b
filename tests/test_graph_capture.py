from types import SimpleNamespace

import pytest
import torch

from tenure._graph_capture import is_capturing


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda", "mps", "xpu"])
def test_nothing_is_captured_on_a_device_that_is_not_in_use(device):
    assert not is_capturing(torch.device(device))


@pytest.mark.parametrize("answer", [True, False])
def test_the_device_module_is_asked_once_it_is_initialized(monkeypatch, answer):
    module = SimpleNamespace(
        is_initialized=lambda: True, is_current_stream_capturing=lambda: answer
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert is_capturing(torch.device("cuda")) is answer


def test_no_context_is_brought_to_life_by_asking(monkeypatch):
    module = SimpleNamespace(
        is_initialized=lambda: False,
        is_current_stream_capturing=lambda: pytest.fail("this would create a context"),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert not is_capturing(torch.device("cuda"))
