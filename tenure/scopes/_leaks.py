"""What outlived a scope and why, as text and numbers; a report keeps no tensor alive.

Shown, tensors that autograd saved in one graph are one row. That is for the eye only: no record is
dropped or altered, and a record with any other holder stands by itself.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from tenure._heap import Holder, find_holders
from tenure._show import (
    Column,
    Paragraph,
    Part,
    Report,
    Table,
    bytes_column,
    in_bytes,
    note_on_shared,
    storage_bytes,
)
from tenure._storages import n_bytes_of, storage_key
from tenure._text import counted, describe, describe_elements, format_bytes, shape_of
from tenure._torch.quiet import without_functions

# The shortest chains are the useful ones; `holders` of the record has all.
_MAX_HOLDERS = 3
_STORAGE = "storage"
_COLUMNS = (
    Column("tensor"),
    bytes_column(_STORAGE),
    Column("created at", is_fixed=True),
    Column("kind", is_fixed=True),
    Column("held by", is_fixed=True),
)


@dataclass(frozen=True, slots=True)
class LeakRecord:
    """One tensor that something other than a running function's variables still held.

    Attributes:
        shape: the tensor's shape; a symbolic size, as of a jagged tensor, by its name.
        dtype: its dtype.
        device: its device.
        nbytes: bytes of its whole storage, whatever part of it the tensor shows.
        created_at: "file.py:17", or None where no site was captured.
        holders: what holds it, the shortest chain first; references without a name only where
            nothing else holds it.
        kind: the kind of the first holder, as in `Holder.kind`.
        graph: what holds the graph of autograd that alone holds the tensor, named like a holder;
            empty where anything else holds it.
        is_shared: an earlier record has the same storage, and counts it.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int = field(metadata={"key": "n_bytes"})
    created_at: str | None
    holders: tuple[str, ...]
    kind: str
    graph: str = ""
    is_shared: bool = False

    def __str__(self) -> str:
        return describe(self.dtype, self.shape, self.device, self.nbytes)

    @property
    def counted_bytes(self) -> int:
        """The bytes that this record adds to a sum, where each storage counts once."""
        return 0 if self.is_shared else self.nbytes


@dataclass(frozen=True, slots=True, repr=False)
class LeakReport(Report):
    """The tensors that outlived one scope; false when there are none.

    Printed, as text or as a table, tensors that nothing but one graph holds share a line; `records`
    has each of them.

    Attributes:
        records: one for each leaked tensor, in the order of creation.
        scope: what the scope is called.
    """

    records: tuple[LeakRecord, ...]
    scope: str

    _figures: ClassVar = ("total_bytes",)

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaked storages, each counted once."""
        return sum(record.counted_bytes for record in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[LeakRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"<LeakReport of {self.summary()}>"

    def _parts(self) -> list[Part]:
        if not self:
            return [Paragraph("", f"{self.summary()}.")]
        note = note_on_shared(record.is_shared for record in self.records)
        rows = list(map(_cells, _grouped(self.records)))
        return [_LeakTable(self.summary(), _COLUMNS, rows, note, by=_STORAGE)]

    def summary(self) -> str:
        """Return the scope, how many tensors outlived it, and their bytes, in one line."""
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
    records = tuple(
        _record(t, site, culprits, seen_keys)
        for (t, site), holders in zip(survivors, found, strict=True)
        if (culprits := _culprits(holders))
    )
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
    n_bytes, is_shared = n_bytes_of(t), key in seen_keys
    if key is not None:
        seen_keys.add(key)
    with without_functions():
        shape, dtype, device = shape_of(t), t.dtype, t.device
    chains = tuple(holder.chain for holder in holders)
    graphs = {holder.graph for holder in holders}
    # Of two graphs neither alone keeps it.
    graph = graphs.pop() if len(graphs) == 1 else ""
    kind = holders[0].kind
    return LeakRecord(shape, dtype, device, n_bytes, site, chains, kind, graph, is_shared)


class _LeakTable(Table):
    """Tensors with who holds them below each."""

    __slots__ = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Paragraph]:
        """Yield the summary, and what each tensor is, where it was made and who holds it."""
        yield Paragraph("", f"{self.title}:")
        for tensor, storage, site, _, held_by in self.rows:
            first, *others = tensor.split("\n")
            text = "\n    ".join([f"  {first}, {storage}", *others])
            made = f", created at {site}" if site else ""
            yield Paragraph("", f"{text}{made}")
            for i, holder in enumerate(held_by.split("\n") if held_by else ()):
                lead = "held by " if i < _MAX_HOLDERS else ""
                yield Paragraph("", f"    {lead}{holder}")
        yield Paragraph("", self.note)


def _cells(records: Sequence[LeakRecord]) -> tuple[str, str, str, str, str]:
    """Return the tensor, its bytes, its site, the kind and the names of its holders."""
    largest = max(records, key=lambda record: record.nbytes)
    site = largest.created_at or ""
    if len(records) > 1:
        n_bytes = sum(record.counted_bytes for record in records)
        tensors = f"{len(records)} tensors that autograd saved\nthe largest {largest}"
        return (tensors, in_bytes(n_bytes), site, largest.kind, f"the graph of {largest.graph}")
    tensor = f"{describe_elements(largest.dtype, largest.shape)} on {largest.device}"
    storage = storage_bytes(largest.nbytes, is_shared=largest.is_shared)
    holders = list(largest.holders[:_MAX_HOLDERS])
    if more := len(largest.holders) - len(holders):
        holders.append(f"and by {more} more")
    return (tensor, storage, site, largest.kind, "\n".join(holders))


def _grouped(records: Iterable[LeakRecord]) -> list[tuple[LeakRecord, ...]]:
    """Return the records in their order, those that one graph alone holds together."""
    groups: defaultdict[object, list[LeakRecord]] = defaultdict(list)
    for i, record in enumerate(records):
        # A step of training leaves hundreds of saved tensors by one loss: one line says it.
        groups[record.graph or i].append(record)
    return list(map(tuple, groups.values()))
