"""A recording in the formats of other tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tenure._errors import ProfilerUsageError
from tenure._report_files import csv_text, write_whole

from .._pages import recording_page
from .._timeline import WRITERS

if TYPE_CHECKING:
    from ._recording import Recording

# What a recording has of its own, whatever was recorded; its timeline's go by a longer name then.
_OWN = (".json", ".csv", ".html")
_LONGER = {".json": ".trace.json", ".csv": ".timeline.csv"}
_HEADINGS = ("device", "when", "category", "name", "shape", "dtype", "created_at", "n_bytes", "n")


def export(recording: Recording, path: Path) -> None:
    """Write it in the format that the end of a name asks for, whatever was recorded.

    Raises:
        ProfilerUsageError: the ending means nothing here, or asks for a timeline without one.
        OSError: it can't be written; there is nothing of it then.
    """
    if not path.name.lower().endswith(_of_timeline()):
        # names may have halves of characters
        write_whole(path, _text(recording, path).encode(errors="backslashreplace"))
    elif recording.timeline is not None:
        recording.timeline.export(path)
    else:
        raise ProfilerUsageError(
            f"{path} asks for live bytes over time, and there is no timeline in this recording. "
            "Record one with tenure run --timeline."
        )


def _of_timeline() -> tuple[str, ...]:
    return (*_LONGER.values(), *(name for name in WRITERS if name not in _OWN))


def _text(recording: Recording, path: Path) -> str:
    extension = path.suffix.lower()
    if extension == ".json":
        return json.dumps(recording.to_dict(), indent=1)
    if extension == ".html":
        return _page(recording)
    if extension == ".csv":
        return csv_text(_rows(recording))
    raise ProfilerUsageError(
        f"{path} ends in {extension or 'no extension'}, and a recording is written as .json, .csv "
        f"or .html; its timeline as {', '.join(_of_timeline())}. Name a file that ends in one of "
        "them."
    )


def _page(recording: Recording) -> str:
    versions = (f"{name} {version}" for name, version in recording.versions.items())
    return recording_page(
        recording.title(),
        told=", ".join(filter(None, (recording.began_at, *versions))),
        ended=recording.ended,
        failed=recording.exit_code not in (0, None),
        peaks=recording.peaks,
        timeline=recording.timeline,
        tracks=recording.tracks,
        leaks=recording.leaks,
        growth=recording.growth,
        lines=recording.lines,
        oom=recording.oom,
        memory=recording.memory,
        notes=recording.notes,
        otherwise=recording._repr_html_(),
    )


def _rows(recording: Recording) -> Iterator[Sequence[object]]:
    yield _HEADINGS
    for track in recording.over_time:
        for block in track.at_peak:
            stack = " < ".join(reversed(block.stack))
            name = block.scope or block.category
            figures = (block.n_bytes, block.n_storages)
            yield (track.device, "peak", block.category, name, "", "", stack, *figures)
    for row in () if recording.memory is None else recording.memory.rows:
        if row.counted_bytes:
            shape = "x".join(map(str, row.shape))
            what = (row.category, row.label, shape, row.dtype, row.created_at or "")
            yield (row.device, "end", *what, row.n_bytes, 1)
