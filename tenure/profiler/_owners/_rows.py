"""What a census tells of each tensor and each storage, as text and numbers; and their order.

What a storage counts as, and who its owner is, is told by the first of the tensors over it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import UntypedStorage

from tenure._text import describe_elements

from ._naming import BUFFERS, OPTIMIZER_STATE, PARAMETERS

GRADIENTS = "gradients"
SAVED = "saved for backward"
OTHERS = "other tensors"
CATEGORIES: tuple[str, ...] = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE, SAVED, OTHERS)
"""What a storage counts as, the first of them that is true of one of its tensors.

Memory that a pager or the like keeps for a model counts as what that says, before all of these.
"""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor, or one part of a tensor that is made of several.

    Attributes:
        name: what holds it: a dotted name of a model, a variable, the node that saved it.
        category: one of the categories of the report.
        shape: its shape; symbolic sizes as text.
        dtype: its dtype, as ``float32``.
        device: its device.
        n_bytes: bytes of the whole storage, whatever part of it the tensor shows.
        owner: the name of the row that counts the storage; None if it is this one.
        created_at: "file.py:17" where a scope with ``capture=`` saw it made; otherwise None.
        graph: what autograd saved: the tensor that its graph hangs on, by name; None where nothing
            in Python has it.
    """

    name: str
    category: str
    shape: tuple[int | str, ...]
    dtype: str
    device: str
    n_bytes: int
    owner: str | None = None
    created_at: str | None = None
    graph: str | None = None

    def __str__(self) -> str:
        return f"{self.label}: {describe_row(self)}"

    @property
    def counted_bytes(self) -> int:
        """What this row adds to a sum, where each storage counts once, in its owner's row."""
        return self.n_bytes if self.owner is None else 0

    @property
    def label(self) -> str:
        """The name, and who holds the graph that saved it: what is to be dropped."""
        if self.graph is None or self.graph == self.name:
            return self.name
        return f"{self.name} in the graph of {self.graph}"


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """One storage and the tensors over it.

    Attributes:
        owner: the row that counts the storage.
        shown_bytes: bytes of the largest tensor over it; less than all if only views are left.
        kind: what holds the owner, as in `Holder.kind`; empty where its name says it.
        others: the other tensors over it.
        identity: a weak reference, the same object as long as it is the same storage; None for
            memory that a library hides, and in a report that was read.
    """

    owner: TensorRow
    shown_bytes: int
    kind: str = ""
    # written nowhere: a report has the rows already, and an identity tells another process nothing
    others: tuple[TensorRow, ...] = field(default=(), metadata={"key": None})
    identity: weakref.ref[UntypedStorage] | None = field(default=None, metadata={"key": None})

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        """All tensors, the owner first."""
        return (self.owner, *self.others)


def describe_row(row: TensorRow) -> str:
    """Return the tensor of a row in the words of all reports."""
    return f"{describe_elements(row.dtype, row.shape)} on {row.device}"
