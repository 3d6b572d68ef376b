"""Cases that processes of their own measure, and how far most of their predictions are off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def measured(
    script: str, names: Sequence[str], at_once: int, seconds_each: int
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Measure names by processes that take some each; a crash ends only one name.

    Args:
        script: a module beside this one, which prints a line of JSON for each case after
            ``--worker NAME|NAME``, with the name of the case.
        names: of what is measured.
        at_once: how many names a process takes.
        seconds_each: the most time for each of them.

    Yields:
        Each name with the fields of a case, or with None where its process ended.
    """
    waiting = list(names)
    while waiting:
        now = waiting[:at_once]
        done = 0
        for fields in _from_worker(script, now, seconds_each):
            done = now.index(fields["name"]) + 1
            yield fields["name"], fields
        if done < len(now):
            # the one after the last that was heard of, or that one at its next size
            yield now[done], None
            done += 1
        waiting = waiting[done:]


def _from_worker(script: str, names: list[str], seconds_each: int) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", f"benchmarks.{script}", "--worker", "|".join(names)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    with subprocess.Popen(
        ["timeout", str(seconds_each * len(names)), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def p99(sizes: Sequence[float]) -> float:
    """Return the size that one in a hundred is above."""
    return sorted(sizes)[min(len(sizes) - 1, int(0.99 * len(sizes)))]
