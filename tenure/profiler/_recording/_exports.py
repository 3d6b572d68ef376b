"""A recording in the formats of other tools."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tenure._errors import ProfilerUsageError

from .._pages import recording_page

if TYPE_CHECKING:
    from ._recording import Recording

_HEADINGS = ("device", "when", "category", "name", "shape", "dtype", "created_at", "n_bytes", "n")


def exported(recording: Recording, path: Path) -> str:
    """The text of a file.

    Raises:
        ProfilerUsageError: the extension means nothing here.
    """
    extension = path.suffix.lower()
    if extension == ".json":
        return json.dumps(recording.to_dict(), indent=1)
    if extension == ".html":
        return _page(recording)
    if extension == ".csv":
        return _csv(recording)
    raise ProfilerUsageError(
        f"{path} ends in {extension or 'no extension'}, and a recording is written as .json, .csv "
        "or .html. Name a file that ends in one of them."
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


def _csv(recording: Recording) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADINGS)
    for track in recording.over_time:
        for block in track.at_peak:
            stack = " < ".join(reversed(block.stack))
            name = block.scope or block.category
            figures = (block.n_bytes, block.n_storages)
            writer.writerow((track.device, "peak", block.category, name, "", "", stack, *figures))
    for row in () if recording.memory is None else recording.memory.rows:
        if row.counted_bytes:
            shape = "x".join(map(str, row.shape))
            what = (row.category, row.label, shape, row.dtype, row.created_at or "")
            writer.writerow((row.device, "end", *what, row.n_bytes, 1))
    return text.getvalue()
