"""The columns of a line profile: ``hits``, ``alloc``, ``freed``, ``net``, ``peak``, statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tenure._errors import ProfilerUsageError
from tenure._text import format_bytes

from ._records import LineRecord

DEFAULT_COLUMNS = ("hits", "alloc", "freed", "net", "peak")
# Every field of memory_stats() that is measured by pool, as torch names them:
# https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
_MEASURED = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
    "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_POOLS = ("all", "large_pool", "small_pool")
_FIGURES = ("current", "peak", "allocated", "freed")
_FIELDS = {f"{what}.{pool}.{f}" for what in _MEASURED for pool in _POOLS for f in _FIGURES}

_FIELDS_IN_WORDS = (
    f"as the fields of a device's memory_stats(), one of {', '.join(_MEASURED)}, with "
    f".{' or .'.join(_POOLS)} and .{' or .'.join(_FIGURES)} behind it, as in active_bytes.all.peak"
)


@dataclass(frozen=True, slots=True)
class LineColumn:
    """One column.

    Attributes:
        name: its heading.
        value: the number that a record has in it, or None.
        is_exact: whether that number is not just a lower bound.
        in_bytes: whether it is a number of bytes.
        of_bytes_moved: whether it says what was allocated or freed: that may be another thread's.
    """

    name: str
    value: Callable[[LineRecord], int | None]
    is_exact: Callable[[LineRecord], bool]
    in_bytes: bool = True
    of_bytes_moved: bool = False

    def cell(self, record: LineRecord) -> str:
        """The number as people read it."""
        value = self.value(record)
        if value is None:
            return ""
        text = format_bytes(value) if self.in_bytes else str(value)
        if self.is_exact(record):
            return text
        # Of a shared device, some of it may be another thread's: neither more nor less is certain.
        return f"~ {text}" if record.shared and self.of_bytes_moved else f">= {text}"


_COLUMNS = {
    column.name: column
    for column in (
        LineColumn("hits", lambda r: r.hits, lambda _: True, in_bytes=False),
        LineColumn("alloc", lambda r: r.allocated_bytes, lambda r: r.exact, of_bytes_moved=True),
        LineColumn("freed", lambda r: r.freed_bytes, lambda r: r.exact, of_bytes_moved=True),
        LineColumn("net", lambda r: r.net_bytes, lambda r: not r.shared, of_bytes_moved=True),
        LineColumn("peak", lambda r: r.peak_bytes, lambda r: r.peak_exact),
    )
}


def columns_named(names: Sequence[str] | None, records: Iterable[LineRecord]) -> list[LineColumn]:
    """The columns of these names, of which fields of ``memory_stats()`` are some.

    Raises:
        ProfilerUsageError: there is no such column, for the devices that were measured.
    """
    if names is None:
        names = DEFAULT_COLUMNS
    if isinstance(names, str):
        names = (names,)
    # Those that were measured; before anything has run, those that torch documents.
    fields: set[str] = set().union(*(record.statistics for record in records))
    return [_COLUMNS.get(name) or _statistic(name, fields) for name in names]


def _statistic(name: str, fields: set[str]) -> LineColumn:
    if name not in (fields or _FIELDS):
        theirs = ", ".join(sorted(fields)) if fields else _FIELDS_IN_WORDS
        raise ProfilerUsageError(
            f"There is no column {name!r}. There are {', '.join(_COLUMNS)}, and {theirs}."
        )
    is_peak = name.endswith(".peak")
    return LineColumn(
        name,
        lambda record: record.statistics.get(name),
        lambda record: record.peak_exact or not is_peak,
        "bytes" in name.partition(".")[0],
    )
