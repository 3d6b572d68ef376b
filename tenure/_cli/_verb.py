"""The base of every verb: a name, help, arguments, what it does, how it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from tenure._byte_sizes import parse_bytes
from tenure._errors import ByteSizeError

if TYPE_CHECKING:
    from tenure._show import Shown

_FEWEST_BYTES = 2**20
"""A bare number below it was meant in a unit: no device has so little."""


class Verb(ABC):
    """A verb of the command line; the docstring of its class is its help.

    Its first line is in the list of verbs.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int | Callable[[], int]:
        """Do it.

        Returns:
            The exit code; or a function that does the rest and returns it, whose errors are not the
            command's but go on as they are.

        Raises:
            CommandError: the user has to change something.
        """


def whole_number(minimum: int, maximum: int = 2**64 - 1) -> Callable[[str], int]:
    """Return a ``type`` for argparse: a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {minimum}")
        if int(text) > maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is above {maximum}")
        return int(text)

    return parse


def byte_size(text: str) -> int:
    """Read a number of bytes for argparse, as ``24GiB``."""
    try:
        n_bytes = parse_bytes(text)
    except ByteSizeError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    if n_bytes < _FEWEST_BYTES and text.strip().isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is {n_bytes} bytes; write the unit, such as {text.strip()}GiB, or "
            f"{text.strip()}B if it is meant"
        )
    return n_bytes


def show(
    shown: Shown,
    facts: Callable[[], Any],
    *,
    as_json: bool,
    top: int | None = None,
    sort: str | None = None,
) -> None:
    """Print a report, in colours on a terminal; or its facts."""
    if as_json:
        print_text(json.dumps(facts(), indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(shown.rich(top=top, sort=sort), crop=False)
        sys.stdout.flush()
    else:
        print_text(shown.text(top=top, sort=sort))


def print_text(text: str) -> None:
    """Print text; a character that the terminal does not have becomes "?"."""
    # a pipe that knows no blocks is no reason to end with an error, whose code means something
    stream: Any = sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    # a pipe that is closed raises its error here
    print(text, flush=True)
