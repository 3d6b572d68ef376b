"""Timing two things side by side: alternately, in one process, so that noise hits both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Loop = Callable[[int], object]
"""Runs the thing under test so many times."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pair:
    """Times of a base and of the thing compared with it.

    Attributes:
        base_s: seconds per run of the base, median over the rounds.
        ours_s: seconds per run of the other.
        ratio: median over the rounds of the ratio of neighbouring times.
        low: 10th percentile of those ratios.
        high: 90th percentile of those ratios.
    """

    base_s: float
    ours_s: float
    ratio: float
    low: float
    high: float


def time_pair(
    base: Loop, ours: Loop, *, rounds: int, runs: int, clock: Clock = time.perf_counter
) -> Pair:
    """Time ``base`` and ``ours`` alternately, ``rounds`` times ``runs`` runs each.

    Args:
        base: what the other is compared with.
        ours: what is compared.
        rounds: how many neighbouring pairs of times to take; they take turns at going first.
        runs: how many runs make up one time.
        clock: seconds; ``time.process_time`` suits loops that only one thread works on, because
            it stands still while other programs have the processor.
    """
    base(runs)
    ours(runs)
    times = []
    for i in range(rounds):
        first, second = (ours, base) if i % 2 else (base, ours)
        pair = _seconds(first, runs, clock), _seconds(second, runs, clock)
        times.append(pair[::-1] if i % 2 else pair)
    ratios = sorted(ours_s / base_s for base_s, ours_s in times)
    return Pair(
        base_s=statistics.median(base_s for base_s, _ in times) / runs,
        ours_s=statistics.median(ours_s for _, ours_s in times) / runs,
        ratio=statistics.median(ratios),
        low=ratios[len(ratios) // 10],
        high=ratios[-1 - len(ratios) // 10],
    )


def _seconds(loop: Loop, runs: int, clock: Clock) -> float:
    start = clock()
    loop(runs)
    return clock() - start
