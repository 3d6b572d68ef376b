"""What outlived a scope and why, as text and numbers; a report keeps no tensor alive.

Shown, tensors that autograd saved in one graph are one row. That is for the eye only: no record is
dropped or altered, and a record with any other holder stands by itself.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from tenure._heap import Holder, find_holders
from tenure._show import Column, Report, Table
from tenure._storages import n_bytes_of, storage_key
from tenure._text import counted, describe, format_bytes, shape_of
from tenure._torch.quiet import without_functions

# The shortest chains are the useful ones; `holders` of the record has all.
_MAX_HOLDERS = 3
_COLUMNS = tuple(
    Column(heading, is_fixed=True) for heading in ("tensor", "created at", "kind", "held by")
)


@dataclass(frozen=True, slots=True)
class LeakRecord:
    """One tensor that something other than a running function's variables still held.

    Attributes:
        shape: the tensor's shape; a symbolic size, as of a jagged tensor, by its name.
        dtype: its dtype.
        device: its device.
        nbytes: bytes of its storage; 0 if an earlier record has the same storage.
        created_at: "file.py:17", or None where no site was captured.
        holders: what holds it, the shortest chain first; references without a name only where
            nothing else holds it.
        kind: the kind of the first holder, as in `Holder.kind`.
        graph: what holds the graph of autograd that alone holds the tensor, named like a holder;
            empty where anything else holds it.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int = field(metadata={"key": "n_bytes"})
    created_at: str | None
    holders: tuple[str, ...]
    kind: str
    graph: str = ""

    def __str__(self) -> str:
        return describe(self.dtype, self.shape, self.device, self.nbytes)

    def line(self) -> str:
        """The tensor and, where it is known, the site that created it."""
        return f"{self}, created at {self.created_at}" if self.created_at else str(self)


@dataclass(frozen=True, slots=True)
class _SavedTensors:
    """Two or more tensors that nothing but one graph holds.

    Attributes:
        records: the records, in the order of creation.
        is_rooted: the tensor whose graph it is stands above in the report.
    """

    records: tuple[LeakRecord, ...]
    is_rooted: bool

    def __str__(self) -> str:
        lead = "and " if self.is_rooted else ""
        largest = f"the largest {self.largest.line()}"
        return f"{lead}{self.summary()}, in the graph of {self.graph}; {largest}"

    @property
    def graph(self) -> str:
        """What holds the graph."""
        return self.records[0].graph

    @property
    def largest(self) -> LeakRecord:
        """The record with the most bytes; of several, the first."""
        return max(self.records, key=lambda record: record.nbytes)

    def summary(self) -> str:
        """How many tensors there are, and their bytes."""
        n_bytes = sum(record.nbytes for record in self.records)
        return f"{len(self.records)} tensors that autograd saved, {format_bytes(n_bytes)}"


@dataclass(frozen=True, slots=True, repr=False, init=False)
class LeakReport(Report):
    """The tensors that outlived one scope; false when there are none.

    Printed, as text or as a table, tensors that nothing but one graph holds share a line; `records`
    has each of them.

    Args:
        records: one for each leaked tensor, in the order of creation.
        scope: what to call the scope.

    Attributes:
        records: the records, as a tuple.
        scope: what the scope is called.
    """

    records: tuple[LeakRecord, ...]
    scope: str

    _figures: ClassVar = ("total_bytes",)

    def __init__(self, records: Sequence[LeakRecord], *, scope: str) -> None:
        # Frozen: a report that is logged and raised must say the same in both places.
        object.__setattr__(self, "records", tuple(records))
        object.__setattr__(self, "scope", scope)

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaked storages, each counted once."""
        return sum(record.nbytes for record in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __bool__(self) -> bool:
        return bool(self.records)

    def __iter__(self) -> Iterator[LeakRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"<LeakReport of {self.summary()}>"

    def __str__(self) -> str:
        lines = [f"{self.summary()}{':' if self else '.'}"]
        for row in _grouped(self.records):
            if isinstance(row, _SavedTensors):
                lines.append(f"  {row}")
            else:
                lines.append(f"  {row.line()}")
                lines.extend(f"    {line}" for line in _holder_lines(row))
        return "\n".join(lines)

    def _parts(self) -> list[Table]:
        rows = list(map(_cells, _grouped(self.records)))
        return [Table(self.summary(), _COLUMNS, rows, is_ruled=True)]

    def summary(self) -> str:
        """The scope, how many tensors outlived it, and their bytes, in one line."""
        if not self:
            return f"{self.scope}: no tensors leaked"
        leaked = f"{counted(len(self), 'tensor')} leaked"
        return f"{self.scope}: {leaked}, {format_bytes(self.total_bytes)}"


def build_leak_report(
    survivors: Sequence[tuple[torch.Tensor, str | None]],
    *,
    scope: str,
    ignore: Collection[object] = (),
) -> LeakReport:
    """Find out which survivors of a scope leaked, and who holds them.

    A survivor that only running functions hold, in plain local variables, did not leak.

    Args:
        survivors: tensors that outlived the scope, each with the site that created it.
        scope: what to call the scope.
        ignore: containers of the caller that hold survivors.

    Returns:
        The report; without survivors an empty one, at once.
    """
    if not survivors:
        return LeakReport((), scope=scope)
    tensors = [t for t, _ in survivors]
    # Our own lists hold every survivor, and would be the first holders that are found.
    found = find_holders(tensors, ignore=(survivors, *survivors, *ignore))
    seen_keys: set[int] = set()
    records = [
        _record(t, site, culprits, seen_keys)
        for (t, site), holders in zip(survivors, found, strict=True)
        if (culprits := _culprits(holders))
    ]
    return LeakReport(records, scope=scope)


def _culprits(holders: list[Holder]) -> list[Holder]:
    lasting = [holder for holder in holders if not holder.running]
    if len(lasting) < len(holders):
        # beside a variable, an unnamed reference is the value that the function is returning
        return [holder for holder in lasting if holder.kind != "unknown"]
    # beside a name it would tell nothing that the user can act on
    return [holder for holder in lasting if holder.named] or lasting


def _record(
    t: torch.Tensor, site: str | None, holders: list[Holder], seen_keys: set[int]
) -> LeakRecord:
    key = storage_key(t)
    # A view and its base are two tensors and one piece of memory.
    n_bytes = 0 if key in seen_keys else n_bytes_of(t)
    if key is not None:
        seen_keys.add(key)
    with without_functions():
        shape, dtype, device = shape_of(t), t.dtype, t.device
    chains = tuple(holder.chain for holder in holders)
    graphs = {holder.graph for holder in holders}
    # Of two graphs neither alone keeps it.
    graph = graphs.pop() if len(graphs) == 1 else ""
    return LeakRecord(shape, dtype, device, n_bytes, site, chains, holders[0].kind, graph)


def _holder_lines(record: LeakRecord) -> list[str]:
    shown = record.holders[:_MAX_HOLDERS]
    more = len(record.holders) - len(shown)
    lines = [f"held by {chain}" for chain in shown]
    return [*lines, f"and by {more} more"] if more else lines


def _cells(row: LeakRecord | _SavedTensors) -> tuple[str, str, str, str]:
    """The row as a table shows it: the tensor, its site, the kind and the names of its holders."""
    if isinstance(row, _SavedTensors):
        largest = row.largest
        tensors = f"{row.summary()}\nthe largest {largest}"
        return (tensors, largest.created_at or "", largest.kind, f"the graph of {row.graph}")
    return (str(row), row.created_at or "", row.kind, "\n".join(row.holders))


def _grouped(records: Iterable[LeakRecord]) -> list[LeakRecord | _SavedTensors]:
    """The records in their order, each followed by what its graph saved.

    A graph whose own tensor is not among the records stands where the first of its tensors was.
    """
    records = tuple(records)
    saved: defaultdict[str, list[LeakRecord]] = defaultdict(list)
    for record in records:
        if record.graph:
            saved[record.graph].append(record)
    # A step of training leaves hundreds of saved tensors by one loss: one line says it. See
    # test_text_has_one_line_for_what_one_graph_saved.
    groups = {graph: tuple(found) for graph, found in saved.items() if len(found) > 1}
    single = [record for record in records if record.graph not in groups]
    # The tensor whose graph it is, if it leaked as well: its group stands below it.
    roots = {chain: record for record in reversed(single) for chain in record.holders}
    rows: list[LeakRecord | _SavedTensors] = []
    for record in records:
        if record.graph not in groups:
            rows.append(record)
            rooted = [
                groups[chain]
                for chain in record.holders
                if roots[chain] is record and chain in groups
            ]
            rows.extend(_SavedTensors(group, is_rooted=True) for group in rooted)
        elif record.graph not in roots and record is groups[record.graph][0]:
            rows.append(_SavedTensors(groups[record.graph], is_rooted=False))
    return rows
