"""The verb that shows what grew, and what outlived its scope."""

from __future__ import annotations

import argparse

from ._printing import add_json, add_rows, show
from ._recordings import loaded
from ._verb import Verb


class Leaks(Verb):
    """Show what held more from step to step, and what outlived scopes that report.

    FILE was written by tenure run --leaks.
    """

    name = "leaks"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""
        parser.add_argument("file", metavar="FILE", help="a recording")
        add_rows(parser)
        add_json(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Read and print."""
        found = loaded(arguments.file).leaks_found()
        show(found, found.to_dict(), as_json=arguments.json, top=arguments.top, sort=arguments.sort)
        return 0
