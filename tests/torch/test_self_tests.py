"""The private names of torch that tenure stands on still do what it takes them for."""

from importlib import import_module
from pathlib import Path

import pytest

import tenure._torch
from tenure._torch import swap, trap

MODULES = sorted(path.stem for path in Path(tenure._torch.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_the_self_test_passes(module):
    if module == "trap" and not trap.works():
        pytest.skip("needs torch 2.12 or newer, built with CUDA: others can't remove a trap")
    assert import_module(f"tenure._torch.{module}").works()


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError])
def test_a_swap_that_raises_anything_is_one_that_does_not_work(monkeypatch, error):
    def changed(*_):
        raise error

    monkeypatch.setattr(swap, "_swap", changed)
    assert not swap.works.__wrapped__()
