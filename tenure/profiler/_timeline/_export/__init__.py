"""Files of other tools: a module for each format, found by how a file's name ends.

A writer gives the text or the bytes of a whole file. Another format is one more entry of
``WRITERS``, which a recording of a timeline is written by as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tenure._errors import ProfilerUsageError
from tenure._report_files import write_whole
from tenure._text import listed

from ..._page import timeline_page
from .._timeline_report import TimelineReport
from ._chrome import chrome_trace
from ._memory_viz import memory_viz_pickle
from ._speedscope import speedscope_profile
from ._table import csv_table

Writer = Callable[[TimelineReport], str | bytes]
WRITERS: dict[str, Writer] = {
    ".pickle": memory_viz_pickle,
    ".speedscope.json": speedscope_profile,
    ".json": chrome_trace,
    ".csv": csv_table,
    ".html": timeline_page,
}
"""By extension; the longest that a name ends with counts."""


def export(report: TimelineReport, path: Path) -> Path:
    """Write a timeline in the format that the name of the file asks for.

    Raises:
        ProfilerUsageError: there is no such format.
        OSError: it can't be written; there is nothing of it then.
    """
    content = _writer_for(path)(report)
    data = content.encode() if isinstance(content, str) else content
    return write_whole(path, data)


def _writer_for(path: Path) -> Writer:
    matching = [extension for extension in WRITERS if path.name.lower().endswith(extension)]
    if not matching:
        raise ProfilerUsageError(
            f"export() got {path.name!r}, and there is no format for that ending; nothing was "
            f"written. There are {listed(sorted(WRITERS), len(WRITERS))}."
        )
    return WRITERS[max(matching, key=len)]
