"""A recording in the formats of other tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tenure._errors import ProfilerUsageError
from tenure._report_files import csv_text, write_whole

from .._page import recording_page
from .._timeline import WRITERS

if TYPE_CHECKING:
    from ._recording import Recording

# What a recording has of its own goes by these names, and its timeline's by longer ones.
_LONGER = {".json": ".trace.json", ".csv": ".timeline.csv"}
_HEADINGS = ("device", "when", "category", "name", "shape", "dtype", "created_at", "n_bytes", "n")


def export(recording: Recording, path: Path, format: str | None) -> None:
    """Write it in the format that the end of a name asks for, whatever was recorded.

    Args:
        recording: what is written.
        path: where to.
        format: a format without its first dot; None takes the end of the path.

    Raises:
        ProfilerUsageError: the ending means nothing here, or asks for a timeline without one.
        OSError: it can't be written; there is nothing of it then.
    """
    asked = path.name.lower() if format is None else f".{format}"
    of_timeline = {_LONGER.get(name, name): write for name, write in WRITERS.items()}
    del of_timeline[".html"]
    for ending, write in of_timeline.items():
        if asked.endswith(ending):
            if recording.timeline is None:
                raise ProfilerUsageError(
                    f"{path} asks for live bytes over time, and there is no timeline in this "
                    "recording. Record one with tenure run --timeline."
                )
            content = write(recording.timeline)
            break
    else:
        extension = Path(f"x{asked}" if format else asked).suffix
        if extension == ".json":
            content = json.dumps(recording.to_dict(), indent=1)
        elif extension == ".html":
            content = recording_page(recording)
        elif extension == ".csv":
            content = csv_text(_rows(recording))
        else:
            raise ProfilerUsageError(
                f"{path} ends in {extension or 'no extension'}, and a recording is written as "
                f".json, .csv or .html; its timeline as {', '.join(of_timeline)}. Name a file that "
                "ends in one of them."
            )
    # names may have halves of characters
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    write_whole(path, data)


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
