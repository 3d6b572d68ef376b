"""The base of every verb: a name, help, arguments, what it does, how it prints and writes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
    options: ClassVar[str]
    """Its arguments, as `add_options` takes them."""
    kinds: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        add_options(parser, cls.options, cls.kinds)

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int | Callable[[], int]:
        """Do it.

        Returns:
            The exit code; or a function that does the rest and returns it, whose errors are not the
            command's but go on as they are.

        Raises:
            CommandError: the user has to change something.
        """


def add_options(parser: Any, text: str, kinds: Mapping[str, Mapping[str, Any]]) -> None:
    """Add arguments to a parser, or to a group of it.

    Args:
        parser: the parser.
        text: the arguments, each on a line of its own as the help shows it: its names and that of
            its value, at least two spaces, and its help, which goes on in lines that begin with a
            space. One without a value is true if it is given; one in braces is one of several.
        kinds: what else argparse is told, by the first name of an argument.
    """
    for each in re.split(r"\n(?! )", text.strip()):
        head, _, words = each.partition("  ")
        *names, value = head.replace(", ", " ").split()
        more: dict[str, Any] = {"help": " ".join(words.split())}
        if value.startswith("-"):
            names.append(value)
            more["action"] = "store_true"
        elif value.startswith("{"):
            more["choices"] = value.strip("{}").split("|")
        else:
            more["metavar"] = value
        if value in _TYPES:
            more["type"] = _TYPES[value]
        parser.add_argument(*names, **(more | {**kinds.get(names[0], {})}))


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


_TYPES: dict[str, Callable[[str], Any]] = {"N": whole_number(1), "SIZE": byte_size}
"""The functions that read a value, by its name in the help."""


def show(
    shown: Shown,
    facts: Callable[[], Any],
    *,
    as_json: bool,
    top: int | None = None,
    sort: str | None = None,
) -> None:
    """Print a report, in colours on a terminal; or its facts."""
    if not as_json and sys.stdout.isatty():
        from rich.console import Console

        Console().print(shown.rich(top=top, sort=sort), crop=False)
        sys.stdout.flush()
    else:
        print_text(json.dumps(facts(), indent=2) if as_json else shown.text(top=top, sort=sort))


def print_text(text: str) -> None:
    """Print text; a character that the terminal does not have becomes "?"."""
    # a pipe that knows no blocks is no reason to end with an error, whose code means something
    stream: Any = sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    # a pipe that is closed raises its error here
    print(text, flush=True)
