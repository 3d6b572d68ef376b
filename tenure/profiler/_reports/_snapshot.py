"""What is alive at one moment, and what two moments tell of the time between.

A snapshot refers to storages weakly: it keeps no tensor alive, and knows each storage again without
mistaking a new one at the same address for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tenure._errors import ProfilerUsageError
from tenure._show import (
    Column,
    Paragraph,
    Part,
    Report,
    Table,
    by_bytes,
    bytes_column,
    signed,
)
from tenure._text import format_bytes

from .._owners import StorageEntry, TensorRow, describe_row, take_census
from ._findings import Finding, find_growth, find_standing
from ._mem_report import UNEXPLAINED, MemReport, build_report

_STORAGE = "storage"
_COLUMNS = (
    Column("held by"),
    Column("change"),
    bytes_column(_STORAGE, signed),
    Column("tensor", spare=2),
    Column("created at", spare=1),
)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Snapshot(Report):
    """The storages of one moment with their names, and the totals of the allocators.

    Attributes:
        report: the memory by device and category.
    """

    _entries: tuple[StorageEntry, ...] = field(metadata={"key": "storages"})
    report: MemReport

    _figures: ClassVar = ("total_bytes",)

    @property
    def total_bytes(self) -> int:
        """Bytes of all devices, by the allocator's count, or on the CPU those of all storages."""
        return self.report.total_bytes

    @property
    def records(self) -> tuple[TensorRow, ...]:
        """The owner of each storage."""
        return tuple(entry.owner for entry in self._entries)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What looks like a leak by itself, as reference cycles and views of large storages do."""
        return find_standing(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def diff(self, other: Snapshot) -> SnapshotDiff:
        """Return the changes from an earlier snapshot to this one.

        Args:
            other: the earlier snapshot; if it is the later one, every sign is reversed.

        Raises:
            ProfilerUsageError: it is no snapshot, or one of the two was read by ``from_dict``.
        """
        if not isinstance(other, Snapshot):
            raise ProfilerUsageError(
                f"diff() wants the earlier Snapshot, and got {type(other).__name__}. Take one with "
                "snapshot() before the code in question."
            )
        if _is_read(self) or _is_read(other):
            raise ProfilerUsageError(
                "A snapshot that was read no longer knows which storage is which, so it can't be "
                "compared. Compare two of one process; of two runs, what `tenure run` recorded: "
                "`tenure diff A B`."
            )
        was, now = _by_storage(other), _by_storage(self)
        new = [entry for key, entry in now.items() if key not in was]
        both = [(was[key].owner, entry.owner) for key, entry in now.items() if key in was]
        return SnapshotDiff(
            self.total_bytes - other.total_bytes,
            tuple(entry.owner for entry in new),
            tuple(entry.owner for key, entry in was.items() if key not in now),
            tuple(pair for pair in both if pair[0].n_bytes != pair[1].n_bytes),
            find_growth(new) + find_standing(new),
        )

    def __repr__(self) -> str:
        return f"<Snapshot of {len(self)} storages, {format_bytes(self.total_bytes)}>"

    def _parts(self) -> Sequence[Part]:
        return self.report._parts()


@dataclass(frozen=True, slots=True, repr=False)
class SnapshotDiff(Report):
    """The difference of two snapshots.

    Attributes:
        total_bytes: bytes by which the total grew; negative if it shrank.
        new: the tensors whose storages came.
        freed: the tensors whose storages went, by the names that they had.
        resized: tensors whose storages stayed and changed in size, as they were and as they are.
        findings: what looks like a leak among the new ones, the largest first.
    """

    total_bytes: int
    new: tuple[TensorRow, ...]
    freed: tuple[TensorRow, ...]
    resized: tuple[tuple[TensorRow, TensorRow], ...] = ()
    findings: tuple[Finding, ...] = ()

    _figures: ClassVar = ("unexplained_bytes", "categories")

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

    def __repr__(self) -> str:
        return f"<SnapshotDiff of {self.summary()}>"

    def summary(self) -> str:
        """Return the change of the total, and how many storages came and went, in one line."""
        return (
            f"{signed(self.total_bytes)}: {len(self.new)} new and {len(self.freed)} freed "
            f"storages, {signed(self.unexplained_bytes)} {UNEXPLAINED}"
        )

    def _changes(self) -> Iterator[tuple[str, TensorRow, int]]:
        yield from (("new", row, row.n_bytes) for row in self.new)
        yield from (("freed", row, -row.n_bytes) for row in self.freed)
        for was, row in self.resized:
            yield "resized", row, row.n_bytes - was.n_bytes

    def _parts(self) -> list[Part]:
        findings = "\n".join(f"- {finding}" for finding in self.findings)
        head = Paragraph(self.summary(), findings)
        rows = [
            (row.label, change, by_bytes(n_bytes), describe_row(row), row.created_at or "")
            for change, row, n_bytes in self._changes()
        ]
        return [head, Table("", _COLUMNS, rows, by=_STORAGE)] if rows else [head]


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
    entries = take_census()
    return Snapshot(tuple(entries), build_report(entries))


def _by_storage(snapshot: Snapshot) -> dict[object, StorageEntry]:
    """Return the entries by storage; opaque memory of a library goes by its name."""
    found: dict[object, StorageEntry] = {}
    for entry in snapshot._entries:
        key: object = entry.owner.name if entry.identity is None else id(entry.identity)
        while key in found:
            key = (key,)
        found[key] = entry
    return found


def _is_read(snapshot: Snapshot) -> bool:
    """Return whether it refers to no storage, as one that was read."""
    return bool(snapshot._entries) and all(entry.identity is None for entry in snapshot._entries)
