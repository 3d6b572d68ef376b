"""The tables and the figure of the docs, written from what the benchmarks left in ``results/``.

A table stands between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` in ``results/README.md``
or on a page of ``docs/``, and is nothing but what ``results/NAME.json`` gives. Knows no torch:
``python -m benchmarks.tables`` takes no time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ._figure import drawn

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "performance.svg"
_SECTION = re.compile(r"(<!-- (\w+): begin -->\n)(.*?)(<!-- \2: end -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (\w+): (?:begin|end) -->")


class TableError(ValueError):
    """A page whose tables can't be told from the rest, or one that no benchmark gives."""


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [*sorted((ROOT / "docs").glob("*.md")), RESULTS / "README.md"]


def rendered(text: str, results: Path = RESULTS) -> str:
    """A page with its tables as the results give them.

    Raises:
        TableError: a marker stands alone, or a table has no file of results.
    """
    sections = [match[2] for match in _SECTION.finditer(text)]
    if len(_MARK.findall(text)) != 2 * len(sections):
        raise TableError(
            f"a marker of {sorted(set(_MARK.findall(text)))} has no other that begins or ends its "
            "table; give each table one line of each."
        )
    return _SECTION.sub(lambda match: f"{match[1]}{_table(match[2], results)}{match[4]}", text)


def sections_of(text: str) -> list[str]:
    """The names of the tables of a page."""
    return [match[2] for match in _SECTION.finditer(text)]


def without_tables(text: str) -> str:
    """A page less its tables: what people wrote."""
    return _SECTION.sub("", text)


def mark(bar: str, reached: bool) -> str:
    """Whether a row reached its bar, in a word; nothing for one that has none."""
    return ("yes" if reached else "no") if bar else ""


def _table(name: str, results: Path) -> str:
    path = results / f"{name}.json"
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise TableError(
            f"the table {name!r} has no {path.name} in benchmarks/results; run its benchmark, or "
            "take its markers out."
        ) from None
    if columns := report.get("columns"):
        cells = [
            columns,
            ["---"] * len(columns),
            *([row[c] for c in columns] for row in report["rows"]),
        ]
        return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in cells)
    lines = [", ".join(f"{key} {value}" for key, value in report["machine"].items()) + ".", ""]
    lines += ["| what | measured | bar | reached | |", "|---|---|---|---|---|"]
    for row in report["rows"]:
        reached = mark(row["bar"], bool(row["reached"]))
        lines.append(
            f"| {row['what']} | {row['value']} | {row['bar']} | {reached} | {row['note']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write every table of every page, and the figure, and say what changed."""
    written = {page: rendered(page.read_text()) for page in pages()}
    for path, text in {**written, FIGURE: drawn(RESULTS)}.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"Wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
