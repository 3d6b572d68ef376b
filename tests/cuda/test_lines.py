from types import SimpleNamespace

import pytest
import torch

from ._lines import pytest_terminal_summary


def _printed(**stats):
    lines = []
    reporter = SimpleNamespace(
        stats=stats, verbosity=0, section=lines.append, write_line=lines.append
    )
    pytest_terminal_summary(reporter)
    return lines


def _report(nodeid, *properties):
    return SimpleNamespace(nodeid=nodeid, when="call", user_properties=properties)


def test_a_run_without_a_gpu_says_that_nothing_was_verified(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert _printed(skipped=[_report("tests/cuda/test_memory.py::test_x[cuda]")]) == [
        "checks on a GPU",
        "nothing was verified: no CUDA device (this PyTorch is 2.13.0+cpu)",
    ]
    assert _printed(skipped=[_report("tests/test_units.py::test_x[cuda]")]) == []


@pytest.mark.parametrize("skipped", [[], [_report("tests/cuda/test_memory.py::test_y[cuda]")]])
def test_a_run_on_a_gpu_has_a_line_for_each_check(monkeypatch, skipped):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    passed = _report("tests/cuda/test_memory.py::test_one_check[cuda]", ("seen", "2 MiB"))
    assert _printed(passed=[passed], skipped=skipped) == [
        "checks on a GPU",
        "ok      one check[cuda]: 2 MiB",
    ]
