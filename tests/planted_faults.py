"""Faults planted in tenure, one changed line each: the tests must notice every one of them.

They are listed in ``planted_faults.txt``.
``python -m tests.planted_faults`` plants each fault in a copy of the repository, runs the tests
that the fault names, and prints whether one of them failed. Give part of a file's name to plant
only its faults: ``python -m tests.planted_faults scopes/``. The exit code is 1 if a fault went
unnoticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parent.parent
# of pytest
_ALL_PASSED, _SOME_FAILED, _NONE_OF_THIS_KIND = 0, 1, 5
_FOLDERS, _FILES = ("tenure", "tests", "benchmarks"), ("conftest.py", "pyproject.toml")


class Fault(NamedTuple):
    """One line of tenure that is changed.

    Attributes:
        file: below ``tenure/``.
        line: what stands there once, without its indentation.
        planted: what stands there instead.
        tests: a file or a folder below ``tests/`` that notices it.
    """

    file: str
    line: str
    planted: str
    tests: str


def _read(text: str) -> tuple[Fault, ...]:
    """Read the list: a file and its tests, ``- line``, ``+ planted``, and an empty line."""
    faults = []
    for block in text.strip().split("\n\n")[1:]:
        where, line, planted = block.split("\n")
        file, tests = where.split()
        faults.append(Fault(file, line.removeprefix("- "), planted.removeprefix("+ "), tests))
    return tuple(faults)


FAULTS = _read(Path(__file__).with_suffix(".txt").read_text("utf-8"))


def is_noticed(fault: Fault, copy: Path) -> bool:
    """Plant one fault in a copy, run its tests, and take it back."""
    path = copy / "tenure" / fault.file
    text = path.read_text("utf-8")
    path.write_text(text.replace(fault.line, fault.planted), "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    try:
        # tests on the simulated device need a process of their own
        for which in ("not simdevice", "simdevice"):
            run = subprocess.run(
                [*command, "-m", which, f"tests/{fault.tests}"], cwd=copy, env=environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if run.returncode == _SOME_FAILED:
                return True
            if run.returncode not in (_ALL_PASSED, _NONE_OF_THIS_KIND):
                raise RuntimeError(f"{fault.tests} can't be run:\n{run.stdout}{run.stderr}")
    finally:
        path.write_text(text, "utf-8")
    return False


def main(part: str = "") -> int:
    """Plant the faults of some files; say how many went unnoticed."""
    chosen = [fault for fault in FAULTS if part in fault.file]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in _FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(_ROOT / name, copy / name, ignore=ignored)
        for name in _FILES:
            shutil.copy(_ROOT / name, copy)
        for fault in chosen:
            began = time.monotonic()
            noticed = is_noticed(fault, copy)
            unnoticed += not noticed
            state = "noticed" if noticed else "UNNOTICED"
            seconds = time.monotonic() - began
            print(f"{state:9} {seconds:4.0f} s  {fault.file}: {fault.planted}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
