"""The verb that shows a recording, or those of several ranks as one view."""

from __future__ import annotations

import argparse

from ._printing import add_json, add_rows, show
from ._recordings import loaded
from ._verb import Verb


class Report(Verb):
    """Show what a run took, how it ended, and what grew; of several ranks, side by side.

    FILE was written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "report"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""
        parser.add_argument("files", nargs="+", metavar="FILE", help="a recording")
        add_rows(parser)
        add_json(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Read and print."""
        found = [loaded(path) for path in arguments.files]
        from tenure.profiler import RecordedRanks

        report = found[0] if len(found) == 1 else RecordedRanks.of(found)
        show(
            report, report.to_dict(), as_json=arguments.json, top=arguments.top, sort=arguments.sort
        )
        return 0
