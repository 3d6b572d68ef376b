"""What is alive at one moment, and what two moments tell of the time between.

A snapshot refers to storages weakly: it keeps no tensor alive, and knows each storage again without
mistaking a new one at the same address for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tenure._errors import ProfilerUsageError
from tenure._show import Column, html_table, rich_table, text_table
from tenure._text import format_bytes

from .._owners import StorageEntry, TensorRow, describe_row, take_census
from ._findings import Finding, find_growth, find_standing
from ._mem_report import UNEXPLAINED, MemReport, build_report

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_ROWS = 20
_COLUMNS = (
    Column("change"),
    Column("held by"),
    Column("tensor"),
    Column("created at"),
    Column("bytes", ">"),
)


class Snapshot:
    """The storages of one moment with their names, and the totals of the allocators.

    Attributes:
        report: the memory by device and category.
    """

    __slots__ = ("_entries", "report")

    def __init__(self, entries: list[StorageEntry], report: MemReport) -> None:
        self._entries = tuple(entries)
        self.report = report

    @property
    def total_bytes(self) -> int:
        """Bytes of all devices: the allocator's count, or on the CPU those of all storages."""
        return self.report.total_bytes

    @property
    def records(self) -> tuple[TensorRow, ...]:
        """The owner of each storage."""
        return tuple(entry.owner for entry in self._entries)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What looks like a leak by itself: reference cycles, and views of large storages."""
        return find_standing(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def diff(self, other: Snapshot) -> SnapshotDiff:
        """What has changed from another, earlier moment to this one.

        Args:
            other: the earlier snapshot; if it is the later one, every sign is reversed.

        Raises:
            ProfilerUsageError: it is no snapshot.
        """
        if not isinstance(other, Snapshot):
            raise ProfilerUsageError(
                f"diff() wants the earlier Snapshot, and got {type(other).__name__}. Take one with "
                "snapshot() before the code in question."
            )
        before = {_key(entry): entry for entry in other._entries}
        now = {_key(entry): entry for entry in self._entries}
        new = [entry for key, entry in now.items() if key not in before]
        gone = [entry.owner for key, entry in before.items() if key not in now]
        resized = [
            (before[key].owner, entry.owner)
            for key, entry in now.items()
            if key in before and before[key].owner.n_bytes != entry.owner.n_bytes
        ]
        return SnapshotDiff(
            self.total_bytes - other.total_bytes,
            tuple(entry.owner for entry in new),
            tuple(gone),
            tuple(resized),
            find_growth(new) + find_standing(new),
            _changes_of_devices(other.report, self.report),
        )

    def __repr__(self) -> str:
        return f"<Snapshot of {len(self)} storages, {format_bytes(self.total_bytes)}>"

    def __str__(self) -> str:
        return str(self.report)

    def __rich__(self) -> RenderableType:
        return self.report.__rich__()

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


@dataclass(frozen=True, slots=True, repr=False)
class SnapshotDiff:
    """The difference of two snapshots.

    Attributes:
        total_bytes: bytes by which the total grew; negative if it shrank.
        new: the tensors whose storages came.
        freed: the tensors whose storages went, by the names that they had.
        resized: tensors whose storages stayed and changed in size, as they were and as they are.
        findings: what looks like a leak among the new ones, the largest first.
        device_bytes: by device, the bytes by which its total grew.
    """

    total_bytes: int
    new: tuple[TensorRow, ...]
    freed: tuple[TensorRow, ...]
    resized: tuple[tuple[TensorRow, TensorRow], ...] = ()
    findings: tuple[Finding, ...] = ()
    device_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def unexplained_bytes(self) -> int:
        """The part of the change that no tensor accounts for."""
        return self.total_bytes - sum(n_bytes for _, _, n_bytes in self._changes())

    @property
    def categories(self) -> dict[str, int]:
        """The change by category, of the categories that changed."""
        found: dict[str, int] = {}
        for _, row, n_bytes in self._changes():
            found[row.category] = found.get(row.category, 0) + n_bytes
        return {name: n_bytes for name, n_bytes in found.items() if n_bytes}

    def __bool__(self) -> bool:
        return bool(self.total_bytes or self.new or self.freed or self.resized)

    def to_dict(self) -> dict[str, object]:
        """The difference as numbers and text, fit for JSON."""
        return {
            "total_bytes": self.total_bytes,
            "unexplained_bytes": self.unexplained_bytes,
            "categories": self.categories,
            "device_bytes": self.device_bytes,
            "changes": [
                {"change": change, "name": row.name, "category": row.category, "n_bytes": n_bytes}
                for change, row, n_bytes in self._changes()
            ],
            "findings": [
                {"kind": finding.kind, "text": finding.text, "n_bytes": finding.n_bytes}
                for finding in self.findings
            ],
        }

    def __repr__(self) -> str:
        return f"<SnapshotDiff of {self.summary()}>"

    def __str__(self) -> str:
        lines = [self.summary(), *(f"  {finding}" for finding in self.findings)]
        if rows := self._rows():
            lines.append(text_table(_COLUMNS, rows))
        return "\n".join(lines)

    def __rich__(self) -> RenderableType:
        return rich_table(self._title(), _COLUMNS, self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._title(), _COLUMNS, self._rows())

    def summary(self) -> str:
        """The change of the total, and how many storages came and went, in one line."""
        return (
            f"{_signed(self.total_bytes)}: {len(self.new)} new and {len(self.freed)} freed "
            f"storages, {_signed(self.unexplained_bytes)} {UNEXPLAINED}"
        )

    def _title(self) -> str:
        return "\n".join((self.summary(), *map(str, self.findings)))

    def _changes(self) -> Iterator[tuple[str, TensorRow, int]]:
        yield from (("new", row, row.n_bytes) for row in self.new)
        yield from (("freed", row, -row.n_bytes) for row in self.freed)
        for was, row in self.resized:
            yield "resized", row, row.n_bytes - was.n_bytes

    def _rows(self) -> list[tuple[str, ...]]:
        ranked = sorted(self._changes(), key=lambda change: -abs(change[2]))
        rows: list[tuple[str, ...]] = [
            (change, row.name, describe_row(row), row.created_at or "", _signed(n_bytes))
            for change, row, n_bytes in ranked[:_MAX_ROWS]
        ]
        if rest := ranked[_MAX_ROWS:]:
            n_bytes = sum(n_bytes for _, _, n_bytes in rest)
            rows.append(("", f"and {len(rest)} more", "", "", _signed(n_bytes)))
        return rows


def snapshot() -> Snapshot:
    """Look at every tensor that is alive now.

    Returns:
        A snapshot that keeps no tensor alive. ``snapshot().diff(earlier)`` tells what came, what
        went, and what looks like a leak among the new.

    Example:
        >>> import torch
        >>> from tenure.profiler import snapshot
        >>> history = []
        >>> before = snapshot()
        >>> for _ in range(3):
        ...     history.append(torch.ones(256))
        >>> change = snapshot().diff(before)
        >>> change.total_bytes, len(change.new)
        (3072, 3)
    """
    entries, hollow = take_census()
    return Snapshot(entries, build_report(entries, hollow))


def _changes_of_devices(before: MemReport, now: MemReport) -> dict[str, int]:
    found = {device.device: device.total_bytes for device in now.devices}
    for device in before.devices:
        found[device.device] = found.get(device.device, 0) - device.total_bytes
    return found


def _key(entry: StorageEntry) -> int | str:
    """The storage itself; memory that a library hides is known by its name alone."""
    return entry.owner.name if entry.identity is None else id(entry.identity)


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{format_bytes(n_bytes)}"
