"""The verb that shows memory as a tree."""

from __future__ import annotations

import argparse

from tenure._errors import CommandError

from ._printing import add_json, show
from ._recordings import loaded
from ._verb import Verb


class Tree(Verb):
    """Show what was alive at the peak as a tree of scopes and lines, the largest first.

    FILE was written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "tree"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""
        parser.add_argument("file", metavar="FILE", help="a recording")
        add_json(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Read, fold and print."""
        found = loaded(arguments.file).tree()
        if not found.devices:
            raise CommandError(
                f"{arguments.file} tells of no memory: nothing was alive at the end, and no peak "
                "was recorded. Record one with tenure run --timeline."
            )
        show(found, found.to_dict(), as_json=arguments.json)
        return 0
