"""What outlived a scope and why, as text and numbers; a report keeps no tensor alive."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tenure._heap import Holder, find_holders
from tenure._storages import n_bytes_of, storage_key
from tenure._text import counted, describe, format_bytes, shape_of
from tenure._torch.quiet import without_functions

from ._leak_groups import SavedTensors, grouped

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class LeakRecord:
    """One tensor that something other than a running function's variables still held.

    Attributes:
        shape: the tensor's shape.
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

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    created_at: str | None
    holders: tuple[str, ...]
    kind: str
    graph: str = ""

    def __str__(self) -> str:
        return describe(self.dtype, self.shape, self.device, self.nbytes)

    def line(self) -> str:
        """The tensor and, where it is known, the site that created it."""
        return f"{self}, created at {self.created_at}" if self.created_at else str(self)


class LeakReport:
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

    __slots__ = ("records", "scope")

    def __init__(self, records: Sequence[LeakRecord], *, scope: str) -> None:
        self.records = tuple(records)
        self.scope = scope

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
        for row in grouped(self.records):
            if isinstance(row, SavedTensors):
                lines.append(f"  {row}")
            else:
                lines.append(f"  {row.line()}")
                lines.extend(f"    {line}" for line in _holder_lines(row))
        return "\n".join(lines)

    def __rich__(self) -> "RenderableType":
        from ._leak_table import leak_table

        return leak_table(self)

    def _repr_html_(self) -> str:
        from ._leak_table import leak_html

        return leak_html(self)

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
    found = find_holders(tensors, ignore=(survivors, *survivors, *ignore))
    counted: set[int] = set()
    records = [
        _record(t, site, culprits, counted)
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
    t: torch.Tensor, site: str | None, holders: list[Holder], counted: set[int]
) -> LeakRecord:
    key = storage_key(t)
    n_bytes = 0 if key in counted else n_bytes_of(t)
    if key is not None:
        counted.add(key)
    with without_functions():
        shape, dtype, device = shape_of(t), t.dtype, t.device
    chains = tuple(holder.chain for holder in holders)
    graphs = {holder.graph for holder in holders}
    graph = graphs.pop() if len(graphs) == 1 else ""
    return LeakRecord(shape, dtype, device, n_bytes, site, chains, holders[0].kind, graph)


def _holder_lines(record: LeakRecord) -> list[str]:
    shown = record.holders[:_MAX_HOLDERS]
    more = len(record.holders) - len(shown)
    lines = [f"held by {chain}" for chain in shown]
    return [*lines, f"and by {more} more"] if more else lines
