"""The verb that shows what the library does."""

from __future__ import annotations

import argparse

from ._verb import Verb, whole_number


class Demo(Verb):
    """Show what tenure does, in about a minute: a leak named, a batch and a model that fit.

    A small network learns from the source of Python's own standard library. Each chapter shows its
    code and what that code did. The last one leaves the files of `tenure run` to look at. Needs no
    network connection and no accelerator.
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
        from tenure._demo import tell

        tell(quick=arguments.quick, steps=arguments.steps, seed=arguments.seed)
        return 0
