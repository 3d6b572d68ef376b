"""The verb that writes a recording in another format."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tenure._errors import CommandError, ProfilerUsageError

from ._printing import add_json, print_text
from ._recordings import loaded
from ._run import check_target
from ._verb import Verb


class Export(Verb):
    """Write a recording for another tool; the end of OUT says which format.

    .json: all of it, in tenure's own format. .csv: what was alive, a row for each.
    .html: a page that stands alone.

    Of a timeline: .trace.json (chrome://tracing, Perfetto), .timeline.csv (a row for each time),
    .pickle (torch's memory_viz), .speedscope.json.

    FILE was written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "export"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""
        parser.add_argument("file", metavar="FILE", help="a recording")
        parser.add_argument("-o", "--output", metavar="OUT", required=True, help="where to")
        parser.add_argument("-f", "--force", action="store_true", help="overwrite OUT")
        add_json(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Read and write."""
        out = arguments.output
        check_target(Path(out), replace=arguments.force)
        recording = loaded(arguments.file)
        try:
            recording.export(out)
        except ProfilerUsageError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(f"{out} can't be written: {error.strerror or error}.") from None
        print(f"Wrote {out}", file=sys.stderr)
        if arguments.json:
            import json

            print_text(json.dumps({"written": out, "n_bytes": os.path.getsize(out)}))
        return 0
