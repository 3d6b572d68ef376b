"""What a verb of the command line is, and how it refuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Protocol


class Verb(Protocol):
    """A verb: its name is that of the class in lower case, its docstring is its help."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the verb's own arguments."""

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Do it and return the exit code; heavy imports belong in here."""
        raise NotImplementedError


def whole_number(minimum: int, maximum: int = 2**64 - 1) -> Callable[[str], int]:
    """A ``type`` for argparse: a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {minimum}")
        if int(text) > maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is above {maximum}")
        return int(text)

    return parse
