"""The verb that compares two recordings."""

from __future__ import annotations

import argparse

from ._printing import add_json, add_rows, show
from ._recordings import loaded
from ._verb import Verb


class Diff(Verb):
    """Show two runs on one axis: what is new, what is gone, what takes more in the second.

    Both were written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "diff"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""
        parser.add_argument("before", metavar="A", help="a recording")
        parser.add_argument("after", metavar="B", help="the one to compare with it")
        add_rows(parser)
        add_json(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Read both and print."""
        before, after = loaded(arguments.before), loaded(arguments.after)
        from tenure.profiler import RecordingDiff

        found = RecordingDiff.of(before, after)
        show(found, found.to_dict(), as_json=arguments.json, top=arguments.top, sort=arguments.sort)
        return 0
