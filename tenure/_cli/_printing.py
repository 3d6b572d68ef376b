"""What verbs print and write: reports in colours, text for any pipe, files."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from tenure._errors import CommandError

if TYPE_CHECKING:
    from tenure._show import Shown


def add_json(parser: argparse.ArgumentParser) -> None:
    """Let a verb print JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Let a verb say which rows of its tables are printed."""
    parser.add_argument("--top", type=int, metavar="N", help="print N rows of each table")
    parser.add_argument("--sort", metavar="COLUMN", help="sort them by a column: its heading")


def show(
    shown: Shown, facts: Any, *, as_json: bool, top: int | None = None, sort: str | None = None
) -> None:
    """Print a report, in colours on a terminal; or its facts."""
    if as_json:
        import json

        print_text(json.dumps(facts, indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(shown.rich(top=top, sort=sort))
    else:
        print_text(shown.text(top=top, sort=sort))


def print_text(text: str) -> None:
    """Print text; what the terminal has no character for becomes a question mark."""
    # a pipe that knows no blocks is no reason to end with an error, whose code means something
    stream: Any = sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    print(text)


def write_file(path: str, text: str) -> None:
    """Write text, and say so.

    Raises:
        CommandError: it can't be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CommandError(f"{path!r} can't be written: {error.strerror}.") from None
    print(f"Wrote {path}", file=sys.stderr)
