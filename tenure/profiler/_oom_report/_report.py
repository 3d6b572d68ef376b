"""One screen about an out-of-memory error, the cause and the remedy in its first line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

from tenure._show import Column, Paragraph, Part, Report, Row, Table, bytes_column, in_bytes
from tenure._text import counted, format_bytes

from .._owners import CATEGORIES, SAVED, StorageEntry, describe_row
from .._reports import place_of
from ._facts import Facts
from ._kinds import Cause, Verdict

CAUSES: tuple[str, ...] = get_args(Cause)
"""What `OomReport.cause` can be."""
_MOST_LINES, _MOST_HOLDERS, _MOST_OF_TEXT = 4, 5, 400


@dataclass(frozen=True, slots=True)
class OomLine:
    """What one line of the program made, or what one place keeps.

    Attributes:
        name: the line, as ``train.py:41``; or the place.
        n_bytes: bytes of its storages.
        n_storages: how many there are.
        what: the largest, such as ``float32[64, 128] on cuda:0``.
    """

    name: str
    n_bytes: int
    n_storages: int
    what: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class OomReport(Report):
    """Why memory ran out, and what there was when it did.

    Attributes:
        cause: one of ``"leak"``, ``"results"``, ``"cycle"``, ``"traceback"``, ``"logits"``,
            ``"optimizer_state"``, ``"batch"``, ``"weights"``, ``"fragmentation"``,
            ``"other_process"``, ``"host"``, ``"unknown"``.
        first_line: the cause and the remedy.
        evidence: sentences with the numbers that speak for it, and further remedies.
        error: the type of the error and the beginning of its text.
        site: the user's line that it came from, as ``train.py:41 in loss_of``; can be empty.
        device: where memory ran out.
        requested_bytes: what the allocation asked for; 0 where nothing tells.
        total_bytes: the memory of the device, or the limit on it; None where nothing tells.
        free_bytes: what of it was free; None where nothing tells.
        cause_bytes: the bytes that speak for the cause.
        categories: bytes by category, on that device.
        lines: the lines that made the most, where sites were captured.
        holders: the places that keep the most.
        fragmentation: ``reserved_bytes``, ``allocated_bytes``, ``unused_bytes`` and
            ``largest_free_bytes`` of the device's allocator; empty where it counts nothing.
        host: the host's memory: that of the process, of its container, and their limits.
        was_handled: the error was raised by torch, and the program may have handled it.
        notes: what could not be seen.
    """

    cause: str
    first_line: str
    evidence: tuple[str, ...]
    error: str
    site: str
    device: str
    requested_bytes: int
    total_bytes: int | None
    free_bytes: int | None
    cause_bytes: int
    categories: dict[str, int]
    lines: tuple[OomLine, ...]
    holders: tuple[OomLine, ...]
    fragmentation: dict[str, int]
    host: dict[str, int]
    was_handled: bool = True
    notes: tuple[str, ...] = ()

    _figures: ClassVar = ("used_bytes",)

    @property
    def used_bytes(self) -> int:
        """What the tensors that were found take on the device."""
        return sum(self.categories.values())

    def __repr__(self) -> str:
        return f"<OomReport of {self.cause} on {self.device}: {self.first_line}>"

    def _parts(self) -> list[Part]:
        told = (self._failure(), *self.evidence, *self.notes)
        # what is below belongs to the first line, and is indented
        lines = [self.first_line, *(f"  {sentence}" for sentence in told), ""]
        sums = "\n".join(self._sums())
        return [
            Paragraph("", "\n".join(lines)),
            *self._tables(),
            *[Paragraph("", sums)] * bool(sums),
        ]

    def _failure(self) -> str:
        at = f" at {self.site}" if self.site else ""
        wanted = f", wanted {format_bytes(self.requested_bytes)}" if self.requested_bytes else ""
        total = f" of {format_bytes(self.total_bytes)}" if self.total_bytes else ""
        free = (
            f", {format_bytes(self.free_bytes)} free{total}" if self.free_bytes is not None else ""
        )
        kind = self.error.partition(":")[0]
        return f"{kind}{at}: {self.device}{wanted}{free or (f', limit{total}' if total else '')}."

    def _tables(self) -> Iterator[Table]:
        total = max(1, self.used_bytes)
        rows = [(name, in_bytes(n), f"{n / total:.0%}") for name, n in self.categories.items() if n]
        if rows:
            yield _table("in use", self.device, "share", rows)
        for heading, lines in (("created at", self.lines), ("kept by", self.holders)):
            if lines:
                yield _table(heading, "bytes", "tensors", list(map(_cells, lines)))

    def _sums(self) -> Iterator[str]:
        told = {name: format_bytes(n) for name, n in {**self.fragmentation, **self.host}.items()}
        if self.fragmentation:
            largest = told.get("largest_free_bytes")
            of_it = f", the largest free block {largest}" if largest else ""
            yield (
                f"{self.device}: {told['allocated_bytes']} allocated of {told['reserved_bytes']} "
                f"reserved, {told['unused_bytes']} unused{of_it}."
            )
        if self.host:
            limits = [
                f"{name} {told[key]}"
                for key, name in (
                    ("limit_bytes", "the container's limit"),
                    ("own_limit_bytes", "its own limit"),
                )
                if key in told
            ]
            limit = f" ({', '.join(limits)})" if limits else ""
            rss, free = told.get("rss_bytes"), told.get("free_bytes")
            yield f"host: the process has {rss}, free {free}{limit}."


def build(facts: Facts, verdict: Verdict) -> OomReport:
    """Put what is known and what is thought of it together; without a reference to anything."""
    info = facts.info
    return OomReport(
        verdict.cause,
        verdict.head,
        verdict.evidence,
        f"{info.chain[-1]}: {info.text[:_MOST_OF_TEXT]}",
        facts.scene.site,
        facts.device,
        facts.wanted_bytes,
        facts.total_bytes,
        facts.free_bytes,
        verdict.n_bytes,
        _by_category(facts),
        _largest(((e.owner.created_at, e) for e in facts.entries), _MOST_LINES),
        _largest(((_holder_of(e), e) for e in facts.entries), _MOST_HOLDERS),
        facts.fragmentation,
        facts.host,
        facts.is_handled,
        tuple(facts.notes),
    )


def _by_category(facts: Facts) -> dict[str, int]:
    names = dict.fromkeys([*CATEGORIES, *(entry.owner.category for entry in facts.entries)])
    return {name: facts.bytes_of(name) for name in names}


def _holder_of(entry: StorageEntry) -> str:
    row = entry.owner
    if row.graph is not None and row.category == SAVED:
        return f"graph of {place_of(row.graph)}"
    return place_of(row.name)


def _largest(found: Iterator[tuple[str | None, StorageEntry]], most: int) -> tuple[OomLine, ...]:
    by_name: dict[str, list[StorageEntry]] = {}
    for name, entry in found:
        if name is not None:
            by_name.setdefault(name, []).append(entry)
    lines = [
        OomLine(
            name,
            sum(e.owner.n_bytes for e in entries),
            len(entries),
            describe_row(max(entries, key=lambda e: e.owner.n_bytes).owner),
        )
        for name, entries in by_name.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.n_bytes)[:most])


def _table(heading: str, n_bytes: str, last: str, rows: Sequence[Row]) -> Table:
    columns = (Column(heading), bytes_column(n_bytes), Column(last))
    return Table("", columns, rows, by=n_bytes, rule="")


def _cells(line: OomLine) -> Row:
    n = counted(line.n_storages, "tensor") if line.n_storages > 1 else line.what
    return line.name, in_bytes(line.n_bytes), n
