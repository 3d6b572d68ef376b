"""What verbs print and write: reports in colours, text for any pipe, files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure._errors import CommandError
from tenure._report_files import is_no_file, write_whole

if TYPE_CHECKING:
    from tenure._show import Shown


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Let a verb print JSON, and say which rows of its tables are printed."""
    parser.add_argument("--json", action="store_true", help="print JSON")
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
        sys.stdout.flush()
    else:
        print_text(shown.text(top=top, sort=sort))


def print_text(text: str) -> None:
    """Print text; what the terminal has no character for becomes "?"."""
    # a pipe that knows no blocks is no reason to end with an error, whose code means something
    stream: Any = sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    # a pipe that is closed is told here
    print(text, flush=True)


def write_file(path: str, text: str) -> None:
    """Write text, and say so.

    Raises:
        CommandError: it can't be written.
    """
    try:
        # names may have halves of characters
        data = text.encode(errors="backslashreplace")
        # a device stays one
        if is_no_file(Path(path)):
            Path(path).write_bytes(data)
        else:
            write_whole(Path(path), data)
    except OSError as error:
        raise CommandError(f"{path!r} can't be written: {error.strerror or error}.") from None
    # without a standard error print() would write to the standard output
    if sys.stderr is not None:
        print(f"Wrote {path}", file=sys.stderr)
