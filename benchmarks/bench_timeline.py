"""What a timeline costs: by operation, by training step, and in memory over many events."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks._pairs import Loop, Pair
from benchmarks._record import Row, publish
from benchmarks.bench_profiler import DispatchLedger, Gpt, trainer
from tenure.profiler import Timeline

_A = torch.ones(8)
_N_EVENTS = 10_000_000
_GIB = 1 << 30


class LargeGpt(Gpt):
    """The same with blocks of 512 features, as people train them on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 512)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(512, 100)


def additions(runs: int) -> None:
    """Small operations, each of which makes a storage and lets one go."""
    for _ in range(runs):
        torch.add(_A, _A)


def pair_of(context: Callable[[], Any], call: Loop, rounds: int, runs: int) -> Pair:
    """Times of a loop without a recording, and within one that began before the clock did."""
    ratios, bases, ours = [], [], []
    for _ in range(rounds):
        base = time_of(nullcontext(), call, runs)
        ours_s = time_of(context(), call, runs)
        bases.append(base)
        ours.append(ours_s)
        ratios.append(ours_s / base)
    ratios.sort()
    middle = len(ratios) // 2
    return Pair(
        base_s=sorted(bases)[middle] / runs,
        ours_s=sorted(ours)[middle] / runs,
        ratio=ratios[middle],
        low=ratios[len(ratios) // 10],
        high=ratios[-1 - len(ratios) // 10],
    )


def time_of(block: AbstractContextManager[Any], call: Loop, runs: int) -> float:
    """Seconds of the processor for so many runs, once inside."""
    with block:
        call(1)
        start = time.process_time()
        call(runs)
        return time.process_time() - start


def operation_rows() -> list[Row]:
    """What a small operation costs more."""
    rows = []
    ways: list[tuple[str, Callable[[], Any]]] = [
        ("recorded", Timeline),
        ("under a bare dispatch mode", DispatchLedger),
    ]
    for what, context in ways:
        pair = pair_of(context, additions, rounds=7, runs=10_000)
        added_us = (pair.ours_s - pair.base_s) * 1e6
        rows.append(_row(f"a + b {what} / plain", pair, f"+{added_us:.2f} us; "))
    return rows


def step_rows() -> list[Row]:
    """Training steps, recorded and plain."""
    rows = []
    cases: list[tuple[str, nn.Module, int, int, float | None]] = [
        ("a GPT of 4 blocks of 512", LargeGpt(), 5, 1, 1.05),
        ("a GPT of 4 blocks of 64, where bookkeeping weighs", Gpt(), 9, 3, None),
    ]
    ways: list[tuple[str, Callable[[], Any]]] = [
        ("recorded", Timeline),
        ("under a bare dispatch mode", DispatchLedger),
    ]
    for what, model, rounds, runs, bar in cases:
        step = trainer(model)

        def steps(n: int, step: Callable[[], None] = step) -> None:
            for _ in range(n):
                step()

        for how, context in ways:
            pair = pair_of(context, steps, rounds, runs)
            limit = bar if context is Timeline else None
            rows.append(_row(f"training step of {what}, {how} / plain", pair, bar=limit))
    return rows


def memory_row() -> Row:
    """Ten million events: what the recording takes, and whether the peak is what it was."""
    process, kept = psutil.Process(), [torch.empty(1000) for _ in range(1000)]
    n_rounds = _N_EVENTS // 2 // len(kept)
    gc.collect()
    before = process.memory_info().rss
    start = time.process_time()
    with Timeline() as timeline:
        for i in range(n_rounds):
            kept = [torch.empty(1000 + (i + j) % 7) for j in range(len(kept))]
            if i == n_rounds // 2:
                large = torch.empty(5_000_000)
                del large
        most = process.memory_info().rss
    seconds = time.process_time() - start
    report = timeline.report
    most = max(most, process.memory_info().rss)
    taken = (most - before) / _GIB
    row = report.devices[0].at_peak[0]
    is_exact = row.n_bytes == 20_000_000
    note = (
        f"{report.n_events:,} events in {seconds:.0f} s; {len(report.devices[0].times_s)} times "
        f"kept; the peak is {'exact' if is_exact else 'wrong'}"
    )
    return Row(
        "memory of a recording of ten million events",
        f"{taken:.3f} GiB",
        "<= 1 GiB, peak exact",
        taken <= 1 and is_exact,
        note,
    )


def opening_row() -> Row:
    """What it takes to begin and to end: who has what is asked at both."""
    times = []
    for _ in range(5):
        start = time.process_time()
        with Timeline():
            pass
        times.append(time.process_time() - start)
    note = f"a heap of {len(gc.get_objects()):,} objects is searched twice; in no other row"
    return Row("begin and end a recording", f"{sorted(times)[2] * 1e3:.0f} ms", note=note)


def _row(what: str, pair: Pair, note: str = "", bar: float | None = None) -> Row:
    plain = f"{pair.base_s * 1e6:,.2f} us plain; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
    ratio = f"{pair.ratio:.3f}"
    if bar is None:
        return Row(what, ratio, note=f"{note}{plain}")
    return Row(what, ratio, f"<= {bar}", pair.ratio <= bar, f"{note}{plain}")


def main() -> None:
    """Measure every row and publish the table."""
    torch.set_num_threads(1)  # so that the time of the process is that of the work
    torch.manual_seed(0)
    publish("timeline", [opening_row(), *operation_rows(), *step_rows(), memory_row()])


if __name__ == "__main__":
    main()
