"""toma's own benchmark: what a retry costs while nothing runs out of memory, ours and toma's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._pairs import Loop, time_pair
from benchmarks._record import Row
from benchmarks.test_micro_adaptive import all_loops

_CASES = {
    "(128, 256, 256)": (torch.zeros(128, 256, 256), 20, 1.05),
    "(128, 16, 16)": (torch.zeros(128, 16, 16), 2000, 1.25),
}
"""Tensors, runs for one time, and the bar."""


def toma_rows() -> list[Row]:
    """Each way to loop over chunks of 32 against the loop by hand."""
    loops = all_loops()
    native = loops.pop("native")
    return [_row(name, shape, native, loop) for shape in _CASES for name, loop in loops.items()]


def _row(
    name: str, shape: str, native: Callable[[Tensor], object], loop: Callable[[Tensor], object]
) -> Row:
    tensor, runs, bar = _CASES[shape]
    is_ours = name.startswith("tenure")
    pair = time_pair(
        _repeated(native, tensor),
        _repeated(loop, tensor),
        rounds=60 if is_ours else 4,
        runs=runs if is_ours else max(1, runs // 500),
        clock=time.process_time,
    )
    what = f"toma's benchmark, {shape}: {name} / native"
    note = f"{pair.base_s * 1e6:,.1f} us native; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
    if not is_ours:
        return Row(what, f"{pair.ratio:,.0f}", note=note)
    return Row(what, f"{pair.ratio:.3f}", f"<= {bar}", pair.ratio <= bar, note)


def _repeated(loop: Callable[[Tensor], object], tensor: Tensor) -> Loop:
    def repeated(runs: int) -> None:
        for _ in range(runs):
            loop(tensor)

    return repeated
