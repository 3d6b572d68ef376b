"""The verb that shows what the library does."""

from __future__ import annotations

import argparse

from ._verb import Verb, whole_number


class Demo(Verb):
    """Train a small transformer in scopes, with a leak planted in its loop.

    The text is the source of Python's own standard library, character by character. Five chapters:
    the loss going down; the live bytes of the same steps without scopes and with them; the report
    that names the list which holds what leaked; training in too little memory for its batch; and
    running the model in too little memory for its weights. Needs no network and no accelerator.
    """

    name = "demo"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""
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

    def run(self, arguments: argparse.Namespace) -> int:
        """Tell the story."""
        from tenure._demo import FULL, QUICK, tell

        settings = QUICK if arguments.quick else FULL
        tell(settings.replace(steps=arguments.steps or settings.steps, seed=arguments.seed))
        return 0
