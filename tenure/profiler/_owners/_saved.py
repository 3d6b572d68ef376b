"""What autograd keeps for a backward pass, storage by storage, without disturbing it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tenure._callers import created_at
from tenure._containers import tensors_in
from tenure._errors import ProfilerUsageError
from tenure._heap import (
    Graphs,
    Image,
    Referent,
    read,
    storage_uses,
)
from tenure._show import Column, Paragraph, Report, Table, bytes_column, in_bytes
from tenure._storages import storage_key
from tenure._text import counted, describe, describe_elements, format_bytes, listed
from tenure._torch.quiet import quietly

from ._parts import TensorPart, device_of, dtype_of, identity_of, parts_of, shape_or_empty

_MAX_PLACES = 2
_STORAGE = "storage"
_COLUMNS = (
    Column("saved by"),
    bytes_column(_STORAGE),
    Column("tensor", spare=2),
    Column("created at", spare=1),
)


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """One storage that a graph keeps for its backward pass.

    Attributes:
        shape: the shape of the saved tensor; of several over the storage, the first.
        dtype: its dtype.
        device: its device.
        n_bytes: bytes of the whole storage.
        saved_by: the nodes and their names for it, as ``AddmmBackward0.mat1``.
        created_at: "file.py:17" where a scope with ``capture=`` saw it made; otherwise None.
        is_leaf: a parameter, a buffer or an input: a tensor that came out of no operation that
            autograd follows, and that something other than the graph holds as well.
        is_packed: an unpack hook stands between it and the backward pass, as of a checkpoint or
            of ``save_on_cpu``; the record is of what the hook was given.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device
    n_bytes: int
    saved_by: tuple[str, ...]
    created_at: str | None = None
    is_leaf: bool = False
    is_packed: bool = False

    def __str__(self) -> str:
        return describe(self.dtype, self.shape, self.device, self.n_bytes)


@dataclass(frozen=True, slots=True, repr=False)
class SavedReport(Report):
    """What the graphs of some tensors keep alive, each storage once.

    Attributes:
        records: a record for each storage, in the order of the backward pass.
        n_nodes: how many nodes the graphs have.
    """

    records: tuple[SavedRecord, ...]
    n_nodes: int

    _figures: ClassVar = ("total_bytes", "leaf_bytes")

    @property
    def total_bytes(self) -> int:
        """Bytes that the graphs add to the memory in use, of all records but those of leaves."""
        return sum(record.n_bytes for record in self.records if not record.is_leaf)

    @property
    def leaf_bytes(self) -> int:
        """Bytes of the leaves (parameters, buffers, inputs), which would live without the graph."""
        return sum(record.n_bytes for record in self.records if record.is_leaf)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[SavedRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"<SavedReport of {self.summary()}>"

    def summary(self) -> str:
        """Return how many nodes there are and what they keep, in one line."""
        kept = sum(not record.is_leaf for record in self.records)
        return (
            f"{counted(self.n_nodes, 'node')} of autograd: {format_bytes(self.total_bytes)} saved "
            f"in {counted(kept, 'storage')}, and {format_bytes(self.leaf_bytes)} of leaves"
        )

    def _parts(self) -> list[Paragraph | Table]:
        if not self.records:
            return [Paragraph("", f"{self.summary()}.")]
        return [Table(self.summary(), _COLUMNS, list(map(_row, self.records)), by=_STORAGE)]


def saved_for_backward(*roots: Tensor | Iterable[Tensor] | Mapping[str, Tensor]) -> SavedReport:
    """Find every byte that the graphs of some tensors keep for their backward pass.

    No unpack hook runs and no checkpoint is recomputed; the graph, its tensors and its gradients
    stay as they are.

    Args:
        *roots: results that autograd follows, such as losses, of any shape, dtype and device; or
            lists, tuples, sets, iterators and dictionaries of them.

    Returns:
        The report. It keeps no tensor alive. ``total_bytes`` is what the graphs add to the memory
        in use: each storage once, those of parameters, buffers and inputs left out. What a hook of
        a tensor or node closes over is not seen, nor what a custom function in C++ saves.

    Raises:
        ProfilerUsageError: an argument is no tensor and holds none.

    Example:
        >>> import torch
        >>> from tenure.profiler import saved_for_backward
        >>> x = torch.ones(256, requires_grad=True)
        >>> report = saved_for_backward(x.exp().sin().sum())
        >>> report.total_bytes, [record.saved_by for record in report.records]
        (1024, [('SinBackward0.self', 'ExpBackward0.result'), ('AccumulateGrad.variable',)])
    """
    with quietly():
        graphs = Graphs(read(t, "grad_fn") for t in _tensors_of(roots))
        found = saved_storages(graphs)
    return SavedReport(tuple(saved.record for saved in found.values()), len(graphs.nodes))


class SavedStorage(NamedTuple):
    """A record, and what only this process can know of it.

    Attributes:
        record: the record.
        identity: its storage by a weak reference; None for memory that a library hides.
        top: a tensor that leads to its graph, weakly; None if there is none.
    """

    record: SavedRecord
    identity: weakref.ref[torch.UntypedStorage] | None
    top: weakref.ref[Tensor] | None


# Weak references: one of ours to a node would hide that a cycle through its context is garbage.
def saved_storages(
    graphs: Graphs, tops: Sequence[Tensor | None] = (), image: Image | None = None
) -> dict[int, SavedStorage]:
    """Return the storages that some graphs keep, by address, which is unique while they live.

    Args:
        graphs: the graphs.
        tops: for each of their roots a tensor that leads to it, if one does.
        image: the image of this moment, if there is one.
    """
    # One storage is often saved several times: by two nodes, or as a tensor and a view of it.
    by_storage: dict[int, list[tuple[Referent, TensorPart]]] = {}
    for entry in graphs.tensors:
        for part in parts_of(entry.found):
            by_storage.setdefault(part.key, []).append((entry, part))
    leaves = _leaf_storages(by_storage, image)
    found: dict[int, SavedStorage] = {}
    for key, entries in by_storage.items():
        top = tops[min(entry.root for entry, _ in entries)] if tops else None
        record, identity = _record(entries, key in leaves), identity_of(entries[0][1].tensor)
        found[key] = SavedStorage(record, identity, None if top is None else weakref.ref(top))
    return found


def _record(entries: list[tuple[Referent, TensorPart]], is_leaf: bool) -> SavedRecord:
    part = entries[0][1]
    places = dict.fromkeys(place + part.label for entry, part in entries for place in entry.places)
    sites = (created_at(t) for entry, part in entries for t in (entry.found, part.tensor))
    return SavedRecord(
        shape_or_empty(part.tensor),
        dtype_of(part.tensor),
        device_of(part.tensor),
        part.n_bytes,
        tuple(places),
        next(filter(None, sites), None),
        is_leaf,
        any(entry.is_packed for entry, _ in entries),
    )


def _leaf_storages(
    by_storage: dict[int, list[tuple[Referent, TensorPart]]], image: Image | None
) -> set[int]:
    leaves, unsure, met = set[int](), set[int](), set[int]()
    for key, entries in by_storage.items():
        met.update(id(t) for entry, part in entries for t in (entry.found, part.tensor))
        if any(entry.is_held and _is_leaf(entry.found) for entry, _ in entries):
            leaves.add(key)
        elif _has_others(entries):
            unsure.add(key)
    # The pass over the heap is paid only then.
    if unsure:
        image = image or Image()
        for t in image.tensors:
            key = storage_key(t) or 0
            if key in unsure and id(t) in image.in_python and id(t) not in met and _is_leaf(t):
                leaves.add(key)
    return leaves


def _has_others(entries: list[tuple[Referent, TensorPart]]) -> bool:
    """Tell whether a leaf that the graph has not saved may show the storage.

    Such as x of x.t() or x.detach().
    """
    bases = [read(part.tensor, "_base") for _, part in entries]
    tensors = [t for entry, part in entries for t in (entry.found, part.tensor)]
    known = {id(t) for t in (*tensors, *bases) if t is not None}
    is_of_leaf = any(base is not None and _is_leaf(base) for base in bases)
    return is_of_leaf or storage_uses(entries[0][1].tensor) > len(known)


def _is_leaf(t: Tensor) -> bool:
    return read(t, "grad_fn") is None


def _tensors_of(roots: Iterable[object]) -> list[Tensor]:
    found: list[Tensor] = []
    for root in roots:
        # an iterator is no container, as reading it empties it
        inside = tensors_in(root if isinstance(root, Iterator) else [root])
        if not inside:
            raise ProfilerUsageError(
                f"saved_for_backward() got {type(root).__name__} without a tensor in it. Pass "
                "the results that you would call backward() on, such as the loss."
            )
        found += inside
    if not found:
        raise ProfilerUsageError(
            "saved_for_backward() was called without an argument. Pass the results that you would "
            "call backward() on, such as the loss."
        )
    return found


def _row(record: SavedRecord) -> tuple[str, ...]:
    place = listed(record.saved_by, _MAX_PLACES)
    notes = ", ".join(compress(("a leaf", "packed"), (record.is_leaf, record.is_packed)))
    label = f"{place} ({notes})" if notes else place
    tensor = f"{describe_elements(record.dtype, record.shape)} on {record.device}"
    return (label, in_bytes(record.n_bytes), tensor, record.created_at or "")
