"""What a benchmark leaves behind: a table to read, a JSON to quote, and the table in the docs."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import tables
from benchmarks.tables import RESULTS, ROOT, mark


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        what: the quantity.
        value: what was measured, as text.
        bar: what was to be reached, as text; empty for a row that only informs.
        reached: whether it was.
        note: the base of a ratio, or the spread.
    """

    what: str
    value: str
    bar: str = ""
    reached: bool = True
    note: str = ""


def publish(name: str, rows: list[Row], *, beside: str = "") -> None:
    """Print the rows, write ``results/<name>.json`` and the tables of the docs.

    Args:
        name: of the file, and of the table.
        rows: of the table.
        beside: what else went on while it was measured, where that matters to a reader.
    """
    show(name, rows)
    path = results_path(name)
    path.parent.mkdir(exist_ok=True)
    machine = _machine() | ({"beside": beside} if beside else {})
    report = {"machine": machine, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Wrote {path.relative_to(ROOT)}")
    tables.main()


def results_path(name: str) -> Path:
    """The JSON of a benchmark."""
    return RESULTS / f"{name}.json"


def show(name: str, rows: list[Row]) -> None:
    """Print the rows."""
    table = Table("what", "measured", "bar", "", "", title=name)
    for row in rows:
        table.add_row(row.what, row.value, row.bar, mark(row.bar, row.reached), row.note)
    Console(width=140).print(table)


def _machine() -> dict[str, str]:
    return {
        "CPU": _cpu(),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
