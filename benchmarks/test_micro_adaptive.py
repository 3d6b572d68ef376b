"""toma's own benchmark, ours beside toma's where that is installed; and on chunks of little work.

Source: the table in toma's README, https://github.com/BlackHC/toma.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tenure import adaptive

_STEP = 32


def native(func: Callable[..., None], tensor: Tensor) -> None:
    """The loop that one would write by hand."""
    start, n_rows = 0, len(tensor)
    while start < n_rows:
        end = min(start + _STEP, n_rows)
        func(tensor.narrow(0, start, end - start), start, end)
        start = end


def fill(chunk: Tensor, start: int, end: int) -> None:
    """What is done with each chunk."""
    chunk[:] = 1.0


def loops_of(package: Any, decorators: Any) -> dict[str, Callable[[Tensor], Any]]:
    """The four ways of a package that has toma's names."""
    chunked, no_cache = decorators.chunked, package.NoBatchsizeCache
    return {
        "simple": lambda tensor: package.simple.chunked(fill, tensor, _STEP),
        "no cache": chunked(initial_step=_STEP, cache_type=no_cache)(fill),
        "explicit": lambda tensor: package.explicit.chunked(fill, tensor, _STEP),
        "decorator": chunked(initial_step=_STEP)(fill),
    }


def all_loops() -> dict[str, Callable[[Tensor], Any]]:
    """By name: the loop by hand, ours, and toma's if it can be imported."""
    loops: dict[str, Callable[[Tensor], Any]] = {"native": lambda tensor: native(fill, tensor)}
    loops |= {f"tenure {name}": loop for name, loop in loops_of(adaptive, adaptive).items()}
    try:
        toma = importlib.import_module("toma")
    except ImportError:
        return loops
    return loops | {f"toma {name}": loop for name, loop in loops_of(toma, toma.toma).items()}


_LOOPS = all_loops()


@pytest.mark.benchmark(group="toma's benchmark, (128, 256, 256) in chunks of 32")
@pytest.mark.parametrize("name", _LOOPS)
def test_large_chunks(benchmark: Any, name: str) -> None:
    benchmark(_LOOPS[name], torch.zeros(128, 256, 256))


@pytest.mark.benchmark(group="little work, (128, 16, 16) in chunks of 32")
@pytest.mark.parametrize("name", _LOOPS)
def test_small_chunks(benchmark: Any, name: str) -> None:
    benchmark(_LOOPS[name], torch.zeros(128, 16, 16))
