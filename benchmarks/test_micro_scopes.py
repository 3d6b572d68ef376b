"""Micro-benchmarks as pytest-benchmark groups: ``pytest benchmarks --benchmark-only``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.bench_scopes import BareMode
from tenure import NewDisposeScope, dispose

_CONTEXTS = {"plain": nullcontext, "bare mode": BareMode, "scope": NewDisposeScope}


@pytest.mark.benchmark(group="a + b")
@pytest.mark.parametrize("name", _CONTEXTS)
def test_tracked_op(benchmark: Any, name: str) -> None:
    a, b = torch.ones(8), torch.ones(8)
    with _CONTEXTS[name]():
        benchmark(lambda: a + b)


@pytest.mark.benchmark(group="empty block")
@pytest.mark.parametrize("context", [torch.no_grad, BareMode, NewDisposeScope])
def test_empty_block(benchmark: Any, context: Any) -> None:
    def block() -> None:
        with context():
            pass

    benchmark(block)


@pytest.mark.benchmark(group="letting go")
@pytest.mark.parametrize("let_go", [lambda tensor: None, dispose], ids=["del", "dispose"])
def test_letting_go(benchmark: Any, let_go: Any) -> None:
    benchmark.pedantic(let_go, setup=lambda: ((torch.ones(8),), {}), rounds=5000)
