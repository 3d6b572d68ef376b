"""The verbs that read recordings: what `tenure run` wrote, or torch's own snapshots."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tenure._byte_sizes import format_bytes
from tenure._errors import CommandError, ProfilerUsageError, ReportFormatError

from ._run import SUFFIX, check_target
from ._verb import Verb, print_text, show

if TYPE_CHECKING:
    from tenure._show import Report as Shown
    from tenure.profiler import Recording


_TRACEBACK, _MOST_READ = "Traceback (most recent call last):", 1 << 20


class ReportVerb(Verb):
    """Show the peak memory of a run, how it ended, and which tensors grew.

    FILE is a recording of tenure run, or a snapshot of torch.cuda.memory._dump_snapshot(). Several
    files are ranks of one run, and shown side by side.

    Examples:
      tenure report
      tenure report train.tenure --top 20
      tenure report train.rank0.tenure train.rank1.tenure
    """

    name = "report"
    options = """
files FILE     a recording (default: the newest *.tenure in this folder)
--json         print JSON
--top N        print N rows of each table
--sort COLUMN  sort the rows by the column with this heading
"""
    kinds: ClassVar[Mapping[str, Any]] = {"files": {"nargs": "*"}}

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


class Tree(ReportVerb):
    """Show the memory at the peak as a tree of scopes and lines, the largest first.

    FILE is a recording of tenure run, or a snapshot of torch.cuda.memory._dump_snapshot(). A
    recording without --timeline shows the memory at its end.
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


class LeaksVerb(ReportVerb):
    """Show which objects held more from step to step, and which tensors outlived their scopes.

    FILE is a recording of tenure run.
    """

    name = "leaks"

    def report_of(self, recordings: list[Recording]) -> Shown:
        """Return what the first has found."""
        return recordings[0].leaks_found()


class Diff(ReportVerb):
    """Compare two runs: which memory is new, gone, or larger in the second.

    Both files are recordings of tenure run, or snapshots of torch.cuda.memory._dump_snapshot().

    Example:
      tenure diff before.tenure after.tenure
    """

    name = "diff"
    kinds: ClassVar[Mapping[str, Any]] = {"files": {"nargs": 2, "help": "a recording"}}

    def report_of(self, recordings: list[Recording]) -> Shown:
        """Return the second beside the first."""
        from tenure.profiler import RecordingDiff

        return RecordingDiff.of(*recordings)


class Export(Verb):
    """Write a recording for another tool; the ending of OUT chooses the format.

    Any recording: .json (everything, in tenure's format), .html (one page without other files).

    A recording with a timeline: .trace.json (chrome://tracing, Perfetto), .pickle (torch's
    memory_viz), .speedscope.json.

    FILE is a recording of tenure run, or a snapshot of torch.cuda.memory._dump_snapshot().

    Examples:
      tenure export train.tenure -o train.html
      tenure export train.tenure -o train.trace.json
    """

    name = "export"
    options = """
file FILE         a recording
-o, --output OUT  the file to write
-f, --force       overwrite OUT
--json            print JSON
"""
    kinds: ClassVar[Mapping[str, Any]] = {"-o": {"required": True}}

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
        raise CommandError(_told_of_log(path) or str(error)) from None


def _told_of_log(path: str) -> str | None:
    """Return what the end of a log tells of memory; None if it has no traceback."""
    with open(path, "rb") as file:
        # it may be of any size
        file.seek(max(0, os.stat(path).st_size - _MOST_READ))
        text = file.read().decode(errors="replace")
    if _TRACEBACK not in text:
        return None
    from tenure._oom import free_bytes_in, oom_info, own_bytes_in, unallocated_bytes_in

    what, cause = "a traceback", ""
    if (info := oom_info(text)) is not None:
        wanted_bytes, free_bytes = info.requested_bytes or 0, free_bytes_in(info.text) or 0
        own_bytes = own_bytes_in(info.text) or 0
        unused_bytes = unallocated_bytes_in(info.text) or 0
        what = f"a log of an out-of-memory error of {info.device or info.kind}"
        is_much = unused_bytes > 0 and own_bytes <= 10 * unused_bytes
        if is_much and 0 < wanted_bytes <= unused_bytes + free_bytes:
            cause = (
                f" The likely cause is fragmentation: {format_bytes(unused_bytes)} were reserved "
                "and unused. Set PYTORCH_ALLOC_CONF=expandable_segments:True."
            )
    return (
        f"{path} is {what}, which does not tell what was in memory.{cause} Record the program: "
        "tenure run SCRIPT."
    )
