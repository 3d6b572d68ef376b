"""The verb that shows what the library does."""

from __future__ import annotations

import argparse

from ._verb import Verb, whole_number


class Demo(Verb):
    """Show what tenure does, in less than a minute: a leak named, a batch and a model that fit.

    A small transformer learns from the source of Python's own standard library. Each chapter shows
    its code and what that code did: a loop that leaks, beside the same loop in scopes; the report
    that names the list which holds the leak; training in too little memory for the batch; the model
    in too little memory for its weights; and the files of `tenure run`, of a program that knows
    nothing of tenure. Needs no network and no accelerator.
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
            help="training steps of each run (default: 10; with --quick 6)",
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
