"""What one run of a program told: how it ended, what it took at most, what grew, and who held it.

A recording is its file: what it shows, it shows in another process, and in another year.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Self

from tenure._errors import ProfilerUsageError, ReportFormatError
from tenure._heap import collector_paused
from tenure._report_files import read_facts, write_facts
from tenure._show import (
    Amounts,
    Column,
    Paragraph,
    Part,
    Report,
    Table,
    Together,
    bytes_column,
    drawn_page,
    in_bytes,
    in_html,
    plain,
    ranked,
)
from tenure._text import counted, describe_elements, format_bytes
from tenure.scopes import LeakReport

from .._lines import RecordsDisplay
from .._oom_report import OomReport
from .._reports import MemReport
from .._timeline import WRITERS, TimelineReport, Track, Writer, write_as_named
from ._growth import LOOKS, Growth
from ._torch_snapshots import is_pickle, tracks_in
from ._tree import RecordedTree, folded, tree_at_peak

MOST_ROWS = 10
"""The rows of each table of a recording, which has many."""
_NO_LEAKS = "Nothing outlived a scope that reports."
_NOT_SOUGHT = "Leaks were not recorded. Run with --leaks to look for them."
# A look counts if it is in all but the first eighth of the steps, of which there are enough.
_LATE, _STEPS = 8, 8
_STORAGE = "storage"
_SHORT_S = 60
_TENSORS = (
    Column("tensor"),
    bytes_column(_STORAGE),
    Column("category", spare=1),
    Column("elements", spare=2),
    Column("created at", spare=3),
)
_AT_MOST = (Column("device"), bytes_column())
# a page with more is slow to open, and nobody reads so far
_MOST_ROWS_OF_PAGE = 1000


@dataclass(frozen=True, slots=True, repr=False)
class Recording(Report):
    """One run of a program, as ``tenure run`` wrote it down.

    Attributes:
        command: the command that was run, as ``("python", "train.py")``.
        began_at: when, as ISO 8601 in UTC.
        duration_s: how long it ran.
        ended: how: ``"exit code 0"``, or the type and the first line of what it raised.
        exit_code: what the shell was told; 128 and its number for a signal.
        versions: of Python, of torch and of tenure.
        peaks: by device, the most bytes that were alive at once, where that was measured.
        leaks: reports of scopes whose policy reports.
        growth: what held more from step to step, the largest first.
        lines: the figures of the functions whose lines were asked for.
        memory: what was alive at the end, or when the error was raised.
        timeline: live bytes over time, by device, category, scope and line.
        oom: the out-of-memory error, explained.
        tracks: live bytes over time, by device, of what has no timeline: a snapshot of torch.
        rank: the rank of a process group; None without one.
        notes: what could not be seen, and why.
        seeks_leaks: whether it was looked for leaks.
        n_looks: how often.
        look_steps: how many steps there were before the last looks and, if steps came after them,
            before the end.
        n_steps: how many steps there were.
        ram_bytes: the most RAM that the process had; None where that was not recorded.
    """

    command: tuple[str, ...]
    began_at: str
    duration_s: float
    ended: str
    exit_code: int | None
    versions: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    leaks: tuple[LeakReport, ...] = ()
    growth: tuple[Growth, ...] = ()
    lines: RecordsDisplay | None = None
    memory: MemReport | None = None
    timeline: TimelineReport | None = None
    oom: OomReport | None = None
    tracks: tuple[Track, ...] = ()
    rank: int | None = None
    notes: tuple[str, ...] = ()
    seeks_leaks: bool = True
    n_looks: int = 0
    look_steps: tuple[int, ...] = ()
    n_steps: int = 0
    ram_bytes: int | None = None

    _is_spaced = True

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of ``tenure run``, or a snapshot that torch wrote.

        Of the latter nothing is run: a pickle that names anything to call is refused.

        Raises:
            ReportFormatError: it is something else, damaged, or of a newer version.
            OSError: it can't be read.
        """
        # its first byte decides, and not what the file is called
        if is_pickle(path):
            return cls._of_torch(path)
        facts = read_facts(path)
        try:
            return cls.from_dict(facts)
        except ReportFormatError as error:
            raise ReportFormatError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write it to a file, whole or not at all; one of that name is replaced.

        Raises:
            OSError: it can't be written.
        """
        write_facts(path, self.to_dict())

    @property
    def over_time(self) -> tuple[Track, ...]:
        """Live bytes over time, by device: the timeline's, or those of a snapshot of torch."""
        return self.tracks if self.timeline is None else self.timeline.devices

    def tree(self) -> RecordedTree:
        """Return the memory at the peak of each device, by scope and line.

        Without a timeline, what was alive at the end, by category and name.
        """
        if self.over_time:
            return tree_at_peak(self.over_time)
        rows = () if self.memory is None else self.memory.rows
        paths = [
            ((f"{row.device}, at the end", row.category, row.name), row.n_bytes, 1)
            for row in rows
            if row.counted_bytes
        ]
        return RecordedTree(folded(paths), "By category and name: no peak was recorded.")

    def export(self, path: str | Path) -> Path:
        """Write it for other tools, whole or not at all; the extension says which format.

        Args:
            path: ``.json`` for all of it, in tenure's own format, ``.html`` for a page that stands
                alone; of a timeline ``.trace.json`` for Chrome and Perfetto, ``.pickle`` and
                ``.speedscope.json``, as `TimelineReport.export` writes them.

        Returns:
            The path.

        Raises:
            ProfilerUsageError: the extension is another, or there is no timeline.
            OSError: it can't be written.
        """

        def of_timeline(write: Writer) -> Writer:
            def written(recording: Recording) -> str | bytes:
                if recording.timeline is None:
                    raise ProfilerUsageError(
                        f"{path} asks for live bytes over time, and there is no timeline in this "
                        "recording. Record one with tenure run --timeline."
                    )
                return write(recording.timeline)

            return written

        writers = {end: of_timeline(write) for end, write in WRITERS.items()}
        return write_as_named(self, path, {**writers, **_OWN})

    def title(self) -> str:
        """Return the command and, of several ranks, whose it was."""
        rank = "" if self.rank is None else f"rank {self.rank}: "
        return f"{rank}{shlex.join(self.command)}"

    def __repr__(self) -> str:
        return f"<Recording of {self.title()!r}, {self.ended}>"

    def _parts(self) -> list[Part]:
        parts: list[Part] = [Paragraph("", "\n".join(self._heading()))]
        if self.oom is not None:
            parts += [Together("Out of memory", self.oom._parts())]
        if self.peaks:
            rows = [(name, in_bytes(n_bytes)) for name, n_bytes in self.peaks.items()]
            parts.append(Table("At most", _AT_MOST, rows, by="bytes"))
        peaks = [
            f"{track.device} after {track.peak_at_s:.1f} s: {most}, and others"
            for track in self.over_time
            if (most := track.largest())
        ]
        if peaks:
            parts.append(Paragraph("", "\n".join(peaks)))
        if leaks := self.leaks_found():
            parts += leaks._parts()
        if self.lines is not None:
            parts += self.lines._parts()
        parts += self._memory_parts()
        if self.notes:
            parts.append(Paragraph("Notes", "\n".join(f"- {note}" for note in self.notes)))
        return parts

    def summary(self) -> str:
        """Return why memory ran out, the highest peak, and what grew most or that nothing grew."""
        lines = [] if self.oom is None else [f"Out of memory: {self.oom.first_line}"]
        if self.peaks:
            device, n_bytes = max(self.peaks.items(), key=lambda each: each[1])
            largest = [track.largest() for track in self.over_time if track.device == device]
            of_it = "".join(f", of it {most}" for most in largest if most)
            lines.append(f"At most {format_bytes(n_bytes)} on {device}{of_it}.")
        elif self.ram_bytes is not None:
            lines.append(f"At most {format_bytes(self.ram_bytes)} of RAM{self._largest_at_end()}.")
        grown = [str(each) for each in self.growth[:1]]
        if (n_more := len(self.growth) - 1) > 0:
            grown.append(f"{n_more} more grew: tenure leaks lists them.")
        if not grown and self.seeks_leaks:
            grown = [self.leaks_found().no_growth()]
        return "\n".join((*lines, *grown))

    def _largest_at_end(self) -> str:
        """Return the largest category at the end, with the place of the largest tensor in it."""
        rows = [] if self.memory is None else [row for row in self.memory.rows if row.counted_bytes]
        if self.memory is None or not rows:
            return ""
        category, n_bytes = max(self.memory.categories.items(), key=lambda each: each[1])
        of_it = [row for row in rows if row.category == category]
        largest = max(of_it or rows, key=lambda row: row.counted_bytes)
        name = largest.label.removeprefix("__main__.")
        return f"; at the end {format_bytes(n_bytes)} of {category}, such as {name}"

    def leaks_found(self) -> RecordedLeaks:
        """Return a report on the piles that grew and the tensors that outlived a scope."""
        leaks = tuple(filter(None, self.leaks))
        looks = (self.n_looks, self.look_steps, self.n_steps)
        return RecordedLeaks(self.growth, leaks, self.seeks_leaks, *looks)

    def _heading(self) -> Iterator[str]:
        yield self.title()
        when = f", {self.began_at[:16].replace('T', ' ')} UTC" if self.began_at else ""
        yield self.ended
        is_short = self.duration_s < _SHORT_S
        lasted = f"{self.duration_s:.1f} s" if is_short else timedelta(seconds=int(self.duration_s))
        yield f"after {lasted}{when}"
        if self.ram_bytes is not None:
            yield f"at most {format_bytes(self.ram_bytes)} of RAM"
        if self.versions:
            yield ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def _memory_parts(self) -> Iterator[Part]:
        if self.memory is None:
            return
        for device in self.memory.devices:
            if not device.total_bytes:
                continue
            when = "at the end" if self.exit_code == 0 else "when it ended"
            amounts = [*device.categories.items(), ("unexplained", device.unexplained_bytes)]
            yield Amounts(f"On {device.device} {when}", ranked(amounts))
            rows = [
                (
                    row.label,
                    in_bytes(row.n_bytes),
                    row.category,
                    describe_elements(row.dtype, row.shape),
                    row.created_at or "",
                )
                for row in device.rows
                if row.counted_bytes
            ]
            if rows:
                title = f"Largest on {device.device}"
                yield Table(title, _TENSORS, rows, by=_STORAGE, most=MOST_ROWS)

    @classmethod
    def _of_torch(cls, path: str | Path) -> Self:
        # it looks through all that was read, again and again, and takes most of the time
        with collector_paused():
            tracks = tracks_in(path)
        last_s = max((track.times_s[-1] for track in tracks), default=0.0)
        return cls(
            command=("torch snapshot", Path(path).name),
            began_at="",
            duration_s=last_s,
            ended="a snapshot of torch",
            exit_code=None,
            peaks={track.device: track.peak_bytes for track in tracks},
            tracks=tracks,
            seeks_leaks=False,
            notes=() if tracks else ("The snapshot has no memory in it.",),
        )


@dataclass(frozen=True, slots=True, repr=False)
class RecordedLeaks(Report):
    """What grew, and what outlived a scope; false where neither was seen.

    Attributes:
        growth: what held more from step to step, the largest first.
        leaks: reports of scopes whose policy reports.
        were_sought: whether the run looked for leaks.
        n_looks: how often it looked for growth.
        look_steps: how many steps there were before the last looks and, if steps came after them,
            before the end.
        n_steps: how many steps there were.
    """

    growth: tuple[Growth, ...]
    leaks: tuple[LeakReport, ...]
    were_sought: bool = True
    n_looks: int = 0
    look_steps: tuple[int, ...] = ()
    n_steps: int = 0

    _is_spaced = True

    def __bool__(self) -> bool:
        return bool(self.growth or self.leaks)

    def __repr__(self) -> str:
        return f"<RecordedLeaks of {len(self.growth)} places and {len(self.leaks)} scopes>"

    def no_growth(self) -> str:
        """Return the sentence for looks that saw no growth."""
        n_steps = self.n_steps
        if not n_steps:
            neither = "no optimizer made a step, and no model was called"
            return f"No growth to judge: {neither}. Compare two snapshots."
        in_steps = counted(n_steps, "step")
        if n_steps < _STEPS:
            return f"Too short to judge growth ({in_steps}). Run at least {_STEPS} steps."
        times = f"looked {counted(self.n_looks, 'time')} in {in_steps}"
        if len({step for step in self.look_steps if step * _LATE >= n_steps}) < LOOKS:
            return (
                f"Not enough looks to judge growth: {times}. It takes {LOOKS} in the last seven "
                "eighths of the steps."
            )
        before = [step for step in self.look_steps if step != n_steps]
        if before and n_steps in self.look_steps:
            times += f": last after step {before[-1]}, then at the end"
        return f"Found no growth from step to step: {times}."

    def _parts(self) -> list[Part]:
        if not self:
            told = f"{self.no_growth()} {_NO_LEAKS}" if self.were_sought else _NOT_SOUGHT
            return [Paragraph("", told)]
        parts: list[Part] = []
        if self.growth:
            lines = [f"- {each}" for each in self.growth[:MOST_ROWS]]
            if (more := len(self.growth) - MOST_ROWS) > 0:
                lines.append(f"and {more} more")
            if self.n_looks:
                lines.append(f"Looked {counted(self.n_looks, 'time')}.")
            parts.append(Paragraph("What grew", "\n".join(lines)))
        for report in self.leaks[:MOST_ROWS]:
            parts += report._parts()
        if (more := len(self.leaks) - MOST_ROWS) > 0:
            parts.append(
                Paragraph("", f"and {counted(more, 'more scope')} with tensors that leaked")
            )
        return [
            replace(each, most=MOST_ROWS) if isinstance(each, Table) else each for each in parts
        ]


def _page(recording: Recording) -> str:
    timeline = recording.timeline
    facts = {"devices": plain(recording.tracks)} if timeline is None else timeline.to_dict()
    return drawn_page(recording.title(), facts, in_html(recording.rich(top=_MOST_ROWS_OF_PAGE)))


_OWN: dict[str, Writer] = {
    ".json": lambda recording: json.dumps(recording.to_dict(), indent=1),
    ".html": _page,
}
