"""Programs that the demo runs beside itself, with the tenure that runs the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tenure


def output_of(*arguments: str, folder: Path | None = None) -> str:
    """What ``python -m`` with these arguments prints, and what it says on its standard error.

    Args:
        *arguments: the module and its arguments.
        folder: where it runs; None for here.
    """
    root = str(Path(tenure.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout
