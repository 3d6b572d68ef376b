"""Captures of graphs on the simulated device, which has none: what a host may not do in one.

Captured work runs at once, so a replay only tells whether its capture came to its end.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tenure.testing import Simulator

from .testing.machine import machine

FORBIDDEN = "CUDA error: operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"


@pytest.fixture
def captures(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`sim`, whose module has `CUDAGraph` and `graph`; what CUDA forbids breaks a capture."""
    module, open_ones = sim.module, []

    class CUDAGraph:
        def __init__(self) -> None:
            self.stream: Any = None
            self.is_broken = self.is_whole = False

        def capture_begin(self) -> None:
            if module.current_stream() is module.default_stream():
                raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
            self.stream = module.current_stream()
            open_ones.append(self)

        def capture_end(self) -> None:
            open_ones.remove(self)
            if self.is_broken:
                raise torch.AcceleratorError(BROKEN)
            self.is_whole = True

        def replay(self) -> None:
            assert self.is_whole, "a replay without a capture that came to its end"

    @contextlib.contextmanager
    def graph(captured: CUDAGraph) -> Iterator[None]:
        module.synchronize()
        with module.stream(module.Stream()):
            captured.capture_begin()
            try:
                yield
            finally:
                captured.capture_end()
                # what ran is seen by all that follows, as what a replay would run
                module.synchronize()

    def forbidding(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            for each in open_ones:
                each.is_broken = True
                raise torch.AcceleratorError(FORBIDDEN)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, names in (
        (machine, ("host_waits", "host_polls")),
        (module, ("synchronize", "empty_cache", "manual_seed", "set_rng_state", "cudart")),
    ):
        for name in names:
            forbidding(owner, name)
    capturing = SimpleNamespace(CUDAGraph=CUDAGraph, graph=graph)
    capturing.is_current_stream_capturing = lambda: any(
        each.stream is module.current_stream() for each in open_ones
    )
    for name, value in vars(capturing).items():
        monkeypatch.setattr(module, name, value, raising=False)
    yield sim
    assert not open_ones
