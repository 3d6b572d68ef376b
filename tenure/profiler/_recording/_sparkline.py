"""Bytes over time as a line of text."""

from __future__ import annotations

from collections.abc import Sequence

_LEVELS = " ▁▂▃▄▅▆▇█"


def drawn(
    times_s: Sequence[float],
    live_bytes: Sequence[int],
    width: int,
    most_s: float,
    most_bytes: int,
) -> str:
    """Live bytes over time in one line of blocks, on an axis that others can share.

    Args:
        times_s: moments since the beginning.
        live_bytes: the most between each of them and the one before it.
        width: the columns of ``most_s``.
        most_s: where the axis ends.
        most_bytes: what a full block stands for.
    """
    highest = [0] * width
    last = 0
    for time, n_bytes in zip(times_s, live_bytes, strict=True):
        at = min(width - 1, int(width * time / most_s)) if most_s > 0 else 0
        # between two moments the level of the first goes on
        for between in range(last, at):
            highest[between] = highest[between] or n_bytes
        highest[at] = max(highest[at], n_bytes)
        last = at
    steps = len(_LEVELS) - 1
    heights = (-(-n_bytes * steps // most_bytes) if most_bytes else 0 for n_bytes in highest)
    return "".join(_LEVELS[min(steps, height)] for height in heights).rstrip()
