"""toma's own benchmark: what a retry costs while nothing runs out of memory, ours and toma's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._pairs import Loop, time_pair
from benchmarks._record import Row
from benchmarks.bench_scopes import BareMode
from benchmarks.test_micro_adaptive import all_loops

_CASES = {
    "(128, 256, 256)": (torch.zeros(128, 256, 256), 20, 1.03),
    "(128, 16, 16)": (torch.zeros(128, 16, 16), 2000, 1.2),
}
"""Tensors, runs for one time, and the bar."""


def toma_rows() -> list[Row]:
    """Each way to loop over chunks of 32 against the loop by hand.

    Ours are judged against that loop under a mode that does nothing: any mode costs so much, by
    the caches that are cold when an operation returns.
    """
    loops = all_loops()
    native = loops.pop("native")
    rows = []
    for shape in _CASES:
        rows.append(_row("a bare mode", shape, "native", native, _under_a_mode(native)))
        for name, loop in loops.items():
            if name.startswith("tenure"):
                bare = _under_a_mode(native)
                rows.append(_row(name, shape, "a bare mode", bare, loop, bar=_CASES[shape][2]))
            rows.append(_row(name, shape, "native", native, loop))
    return rows


def _under_a_mode(loop: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def under(tensor: Tensor) -> None:
        with BareMode():
            loop(tensor)

    return under


def _row(
    name: str,
    shape: str,
    base_name: str,
    base: Callable[[Tensor], object],
    loop: Callable[[Tensor], object],
    *,
    bar: float | None = None,
) -> Row:
    tensor, runs, _ = _CASES[shape]
    is_ours = not name.startswith("toma")
    pair = time_pair(
        _repeated(base, tensor),
        _repeated(loop, tensor),
        rounds=60 if is_ours else 4,
        runs=runs if is_ours else max(1, runs // 500),
        clock=time.process_time,
    )
    what = f"toma's benchmark, {shape}: {name} / {base_name}"
    note = f"{pair.base_s * 1e6:,.1f} us {base_name}; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
    if not is_ours:
        return Row(what, f"{pair.ratio:,.0f}", note=note)
    if bar is None:
        return Row(what, f"{pair.ratio:.3f}", note=note)
    return Row(what, f"{pair.ratio:.3f}", f"<= {bar}", pair.ratio <= bar, note)


def _repeated(loop: Callable[[Tensor], object], tensor: Tensor) -> Loop:
    def repeated(runs: int) -> None:
        for _ in range(runs):
            loop(tensor)

    return repeated
