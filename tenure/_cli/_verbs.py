"""The verbs of the command line: one class each, whose docstring is its help."""

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


class Demo:
    """Train a small transformer in scopes, with a leak planted in its loop.

    The text is the source of Python's own standard library, character by character. Five chapters:
    the loss going down; the live bytes of the same steps without scopes and with them; the report
    that names the list which holds what leaked; training in too little memory for its batch; and
    running the model in too little memory for its weights. Needs no network and no accelerator.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare ``--quick``, ``--steps`` and ``--seed``."""
        parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
        parser.add_argument(
            "--steps",
            type=whole_number(1),
            metavar="N",
            help="steps of the first chapter (default: 300; with --quick 40)",
        )
        parser.add_argument(
            "--seed",
            type=whole_number(0),
            default=0,
            metavar="N",
            help="of the weights and of the batches (default: 0)",
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Tell the chapters."""
        from tenure._demo import FULL, QUICK, tell

        settings = QUICK if arguments.quick else FULL
        tell(settings.replace(steps=arguments.steps or settings.steps, seed=arguments.seed))
        return 0
