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

_ROOT = Path(__file__).parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_DOCS = _ROOT / "docs" / "performance.md"


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


def publish(name: str, rows: list[Row]) -> None:
    """Print the rows, write ``results/<name>.json`` and the section ``name`` of the docs page."""
    _print(name, rows)
    path = results_path(name)
    path.parent.mkdir(exist_ok=True)
    report = {"machine": _machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Wrote {path.relative_to(_ROOT)}")
    write_docs(name)


def write_docs(name: str) -> None:
    """Write the section ``name`` of the docs page from its JSON."""
    report = json.loads(results_path(name).read_text())
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = _DOCS.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    _DOCS.write_text(f"{head}{begin}\n{_markdown(report)}{end}{tail}")
    print(f"Wrote {_DOCS.relative_to(_ROOT)}")


def results_path(name: str) -> Path:
    """The JSON of a benchmark."""
    return _RESULTS / f"{name}.json"


def _print(name: str, rows: list[Row]) -> None:
    table = Table("what", "measured", "bar", "", "", title=name)
    for row in rows:
        table.add_row(row.what, row.value, row.bar, _mark(row.bar, row.reached), row.note)
    Console(width=140).print(table)


def _markdown(report: dict[str, dict[str, str] | list[dict[str, str]]]) -> str:
    machine, rows = report["machine"], report["rows"]
    assert isinstance(machine, dict)
    lines = [", ".join(f"{key} {value}" for key, value in machine.items()) + ".", ""]
    lines += ["| what | measured | bar | reached | |", "|---|---|---|---|---|"]
    for row in rows:
        assert isinstance(row, dict)
        mark = _mark(row["bar"], bool(row["reached"]))
        lines.append(f"| {row['what']} | {row['value']} | {row['bar']} | {mark} | {row['note']} |")
    return "\n".join(lines) + "\n"


def _mark(bar: str, reached: bool) -> str:
    return ("yes" if reached else "no") if bar else ""


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
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
