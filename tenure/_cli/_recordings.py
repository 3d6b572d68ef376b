"""The verbs that read recordings: what `tenure run` wrote, or torch's own snapshots."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tenure._errors import CommandError, ProfilerUsageError, ReportFormatError

from ._run import SUFFIX, check_target
from ._verb import Verb, print_text, show

if TYPE_CHECKING:
    from tenure._show import Report as Shown
    from tenure.profiler import Recording


class Report(Verb):
    """Show what a run took, how it ended, and what grew; of several ranks, side by side.

    FILE was written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "report"
    n_files: ClassVar[int | str] = "*"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        newest = f" (default: the newest *{SUFFIX} of this folder)" if cls.n_files == "*" else ""
        parser.add_argument("files", nargs=cls.n_files, metavar="FILE", help=f"a recording{newest}")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument("--top", type=int, metavar="N", help="print N rows of each table")
        parser.add_argument("--sort", metavar="COLUMN", help="sort them by a column: its heading")

    def run(self, arguments: argparse.Namespace) -> int:
        """Read and show."""
        found = [_loaded(path) for path in arguments.files or [_newest()]]
        report = self.report_of(found)
        rows = {"top": arguments.top, "sort": arguments.sort}
        show(report, report.to_dict, as_json=arguments.json, **rows)
        return 0

    def report_of(self, recordings: list[Recording]) -> Shown:
        """Return the only one, or all as ranks."""
        from tenure.profiler import RecordedRanks

        return recordings[0] if len(recordings) == 1 else RecordedRanks.of(recordings)


class Tree(Report):
    """Show what was alive at the peak as a tree of scopes and lines, the largest first.

    FILE was written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "tree"

    def report_of(self, recordings: list[Recording]) -> Shown:
        """Return the tree of the first."""
        found = recordings[0].tree()
        if not found.devices:
            raise CommandError(
                "The recording tells of no memory: nothing was alive at the end, and no peak was "
                "recorded. Record one with tenure run --timeline."
            )
        return found


class Leaks(Report):
    """Show what held more from step to step, and what outlived scopes that report.

    FILE was written by tenure run --leaks.
    """

    name = "leaks"

    def report_of(self, recordings: list[Recording]) -> Shown:
        """Return what the first has found."""
        return recordings[0].leaks_found()


class Diff(Report):
    """Show two runs beside each other: what is new, what is gone, what takes more in the second.

    Both were written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "diff"
    n_files = 2

    def report_of(self, recordings: list[Recording]) -> Shown:
        """Return the second beside the first."""
        from tenure.profiler import RecordingDiff

        return RecordingDiff.of(*recordings)


class Export(Verb):
    """Write a recording for another tool; the end of OUT says which format.

    json: all of it, in tenure's own format. html: a page that stands alone.

    Of a timeline: trace.json (chrome://tracing, Perfetto), timeline.csv (a row for each time),
    pickle (torch's memory_viz), speedscope.json.

    FILE was written by tenure run, or by torch.cuda.memory._dump_snapshot().
    """

    name = "export"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        parser.add_argument("file", metavar="FILE", help="a recording")
        parser.add_argument("-o", "--output", metavar="OUT", required=True, help="where to")
        parser.add_argument("-f", "--force", action="store_true", help="overwrite OUT")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Read and write."""
        out = arguments.output
        check_target(Path(out), replace=arguments.force)
        recording = _loaded(arguments.file)
        try:
            recording.export(out)
        except ProfilerUsageError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(f"{out} can't be written: {error.strerror or error}.") from None
        print(f"Wrote {out}", file=sys.stderr)
        if arguments.json:
            print_text(json.dumps({"written": out, "n_bytes": os.path.getsize(out)}))
        return 0


def _newest() -> str:
    found = max(Path().glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if found is None:
        raise CommandError(
            f"There is no *{SUFFIX} in this folder. Name a file, or record one with tenure run."
        )
    return str(found)


def _loaded(path: str) -> Recording:
    """Read a file of ``tenure run``, or a snapshot of torch.

    Raises:
        CommandError: it can't be read, or is something else.
    """
    try:
        # a missing file is an error before torch is imported, which takes seconds
        os.stat(path)
        from tenure.profiler import Recording

        return Recording.load(path)
    except OSError as error:
        raise CommandError(f"{path} can't be read: {error.strerror or error}.") from None
    except ReportFormatError as error:
        raise CommandError(str(error)) from None
