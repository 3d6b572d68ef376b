"""Who has which storage: every tensor of the process by name and category, each storage once.

Invariant: a storage's bytes stand in exactly one row, that of its owner; every other row over it
has 0 bytes and names the owner. The answer is text, numbers and weak references to storages.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from tenure._callers import created_at
from tenure._heap import (
    OF_VARIABLE,
    Holder,
    cpp_references,
    find_holders,
    gradient_of,
    instances,
    is_kind,
    is_node_class,
    read,
    tracked_objects,
    type_name,
)
from tenure._registries import NamedTensor, namers
from tenure._storages import element_bytes, is_hollow, storage_bytes, storage_key
from tenure._text import dtype_name, listed
from tenure._torch.quiet import quietly
from tenure._torch.storages import key_of

from ._naming import BUFFERS, OPTIMIZER_STATE, PARAMETERS, Kept, Names
from ._parts import (
    device_of,
    dtype_of,
    identity_of,
    is_plain,
    parts_of,
    shape_or_empty,
)
from ._saved import SavedRecord, SavedStorage, saved_storages

GRADIENTS = "gradients"
SAVED = "saved for backward"
OTHERS = "other tensors"
CATEGORIES: tuple[str, ...] = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE, SAVED, OTHERS)
"""What a storage counts as, the first of them that is true of one of its tensors.

Memory that a pager or the like keeps for a model counts as what that says, before all of these.
"""

_MAX_SEARCHED = 5000
_BORROWING = frozenset({"view", "autograd", "numpy"})
# references to a handle from the list of all, and from the variable that is asked about
_OWN_REFERENCES = 1 + OF_VARIABLE


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor, or one part of a tensor that is made of several.

    Attributes:
        name: what holds it: a dotted name of a model, a variable, the node that saved it.
        category: one of the categories of the report.
        shape: its shape; symbolic sizes as text.
        dtype: its dtype, as ``float32``.
        device: its device.
        n_bytes: bytes of the whole storage, if this row stands for it; 0 in the other rows over it.
        owner: the name of the row with the bytes; None if it is this one.
        created_at: "file.py:17" where a scope with ``capture=`` saw it made; otherwise None.
    """

    name: str
    category: str
    shape: tuple[int | str, ...]
    dtype: str
    device: str
    n_bytes: int
    owner: str | None = None
    created_at: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {describe_row(self)}"


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """One storage and the tensors over it, its owner first.

    Attributes:
        rows: the tensors.
        identity: a weak reference, the same object as long as it is the same storage; None for
            memory that a library hides.
        shown_bytes: bytes of the largest tensor over it; less than all if only views are left.
        kind: what holds the owner, as in `HolderList.kinds`; empty where its name says it.
        has_graph: a graph of autograd hangs on one of the tensors.
    """

    rows: tuple[TensorRow, ...]
    identity: weakref.ref[UntypedStorage] | None
    shown_bytes: int
    kind: str = ""
    has_graph: bool = False

    @property
    def owner(self) -> TensorRow:
        """The row with the bytes."""
        return self.rows[0]


_LAST = sys.maxsize


class _Held(NamedTuple):
    """What a tensor is called, by what kind of holder, and its place among the named."""

    name: str
    kind: str = ""
    order: int = _LAST


class _Member(NamedTuple):
    row: TensorRow
    tensor_bytes: int
    held: _Held
    has_graph: bool = False

    @property
    def rank(self) -> tuple[int, int, int, int, str]:
        """Named parameters, buffers and so on in their order; the rest by size."""
        row = self.row
        category = CATEGORIES.index(row.category) if row.category in CATEGORIES else -1
        return category, self.held.order, -row.n_bytes, -self.tensor_bytes, row.name


def describe_row(row: TensorRow) -> str:
    """The tensor of a row in the words of all reports."""
    sizes = ", ".join(map(str, row.shape))
    return f"{row.dtype}[{sizes}] on {row.device}"


def take_census(
    models: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()
) -> tuple[list[StorageEntry], list[TensorRow]]:
    """List every storage, and the tensors that have none (meta, fake).

    Args:
        models: modules whose names come without the name of their class.
        optimizers: optimizers whose state is named.

    Returns:
        The storages, and rows of tensors without memory.
    """
    with quietly():
        survey = _Survey()
        saved = saved_storages(survey.nodes)[0]
        names = Names(list(models), survey.modules, [*optimizers, *survey.optimizers], survey.kept)
        return _Census(names, survey, saved).result()


class _Survey:
    """Tensors and what tells something of them, from one pass over the heap.

    Attributes:
        tensors: all tensors; weakly, as references of ours would hide that others hold them.
        nodes: the nodes of every graph that a tensor or a variable leads to.
        modules: all modules.
        optimizers: all optimizers.
        storages: the handles of storages.
        kept: the tensors that pagers and the like keep, which the pass has therefore seen.
    """

    def __init__(self) -> None:
        self.kept = [
            Kept(namer.served_model(), named)
            for namer in namers.alive()
            for named in namer.named_tensors()
        ]
        found = instances(tracked_objects(), _is_surveyed)
        tensors = instances(found, lambda cls: is_kind(cls, Tensor))
        self.tensors = list(map(weakref.ref, tensors))
        nodes = [*(read(t, "grad_fn") for t in tensors), *instances(found, is_node_class)]
        self.nodes = list({id(node): node for node in nodes if node is not None}.values())
        self.modules = instances(found, lambda cls: is_kind(cls, nn.Module))
        self.optimizers = instances(found, lambda cls: is_kind(cls, Optimizer))
        self.storages = instances(found, lambda cls: is_kind(cls, UntypedStorage))


def _is_surveyed(cls: type) -> bool:
    return is_kind(cls, Tensor, nn.Module, Optimizer, UntypedStorage) or is_node_class(cls)


class _Census:
    """The work of one census; it holds every tensor while it lasts.

    The order matters: who holds a tensor can only be told before the census itself refers to it
    from more than one list.
    """

    def __init__(self, names: Names, survey: _Survey, saved: dict[int, SavedStorage]) -> None:
        self._names = names
        self._bare = survey.storages
        self._saved = saved
        self._homes = _homes(kept.named for kept in survey.kept)
        self._handles = [t for reference in survey.tensors if (t := reference()) is not None]
        self._in_python = {
            id(t) for t in self._handles if sys.getrefcount(t) - _OWN_REFERENCES > cpp_references(t)
        }
        self._gradients = {id(g) for t in self._handles if (g := gradient_of(t)) is not None}
        self._inner = {id(inner) for t in self._handles for inner in _inner_of(t)}
        self._held = self._search()
        self._members: dict[int, list[_Member]] = {}
        self._identities: dict[int, weakref.ref[UntypedStorage] | None] = {}
        self._hollow: list[TensorRow] = []
        self._n_unnamed = 0

    def result(self) -> tuple[list[StorageEntry], list[TensorRow]]:
        """The storages in the order of their owners' categories, and rows without memory."""
        for t in self._handles:
            if id(t) in self._in_python or self._names.get(t) is not None:
                self._add_handle(t)
            gradient = gradient_of(t)
            if gradient is not None:
                named = self._named(t, "")
                self._add(gradient, named._replace(name=f"{named.name}.grad"), GRADIENTS)
        self._add_saved()
        self._add_rest()
        for members in self._members.values():
            members.sort(key=lambda member: member.rank)
        keys = sorted(self._members, key=lambda key: self._members[key][0].rank)
        return [self._entry(key) for key in keys], sorted(self._hollow, key=lambda row: row.name)

    def _search(self) -> dict[int, _Held]:
        """Name the largest of the tensors that no module and no optimizer has a name for."""
        unnamed = [
            t
            for t in self._handles
            if id(t) in self._in_python
            and id(t) not in self._gradients
            and id(t) not in self._inner
            and self._names.get(t) is None
        ]
        unnamed.sort(key=lambda t: -(storage_bytes(t) or 0))
        del unnamed[_MAX_SEARCHED:]
        found = find_holders(unnamed, live=self._handles)
        held = zip(map(id, unnamed), map(_best, found), strict=True)
        return {key: best for key, best in held if best is not None}

    def _add_handle(self, t: Tensor) -> None:
        if id(t) not in self._gradients and id(t) not in self._inner:
            named = self._names.get(t)
            is_parameter = is_kind(type(t), nn.Parameter)
            category = named.category if named else PARAMETERS if is_parameter else OTHERS
            self._add(t, self._named(t, type_name(type(t))), category)

    def _named(self, t: Tensor, fallback: str) -> _Held:
        named = self._names.get(t)
        if named is not None:
            return _Held(named.name, order=named.order)
        held = self._held.get(id(t))
        if held is None:
            self._n_unnamed += 1
            # numbered, as nothing else tells them apart
            name = f"{fallback or type_name(type(t))}{self._n_unnamed - 1}"
            held = self._held[id(t)] = _Held(name, "unknown")
        return held

    def _add(self, t: Tensor, held: _Held, category: str) -> None:
        site = created_at(t)
        has_graph = read(t, "grad_fn") is not None
        parts = parts_of(t)
        for part in parts:
            row = _row(held.name + part.label, category, part.tensor, site)
            key = self._home(part.key)
            if key == part.key:
                self._identities.setdefault(key, identity_of(part.tensor))
            member = _Member(
                replace(row, n_bytes=part.n_bytes), element_bytes(part.tensor), held, has_graph
            )
            self._members.setdefault(key, []).append(member)
        if not parts and _is_hollow(t):
            self._hollow.append(replace(_row(held.name, category, t, site), device="meta"))

    def _add_saved(self) -> None:
        """What only a graph keeps; and what it shares with a variable is the graph's as well."""
        for own_key, (record, identity) in self._saved.items():
            key = self._home(own_key)
            members = self._members.get(key)
            if members and not record.is_leaf:
                first = min(members, key=lambda member: member.rank)
                if first.row.category == OTHERS:
                    row = replace(first.row, category=SAVED)
                    members[members.index(first)] = first._replace(
                        row=row, tensor_bytes=row.n_bytes
                    )
            elif not members:
                self._members[key] = [_member_of(record)]
                self._identities[key] = identity

    def _add_rest(self) -> None:
        """Memory that only C++ refers to, and bare storages."""
        for t in self._handles:
            if any(self._home(part.key) not in self._members for part in parts_of(t)):
                self._add(t, self._named(t, ""), OTHERS)
        for storage in self._bare:
            if self._home(key_of(storage)) in self._members:
                continue
            if storage.nbytes() and not is_hollow(storage):
                # numbered like tensors without a name
                name = f"UntypedStorage{self._n_unnamed}"
                self._n_unnamed += 1
                n_bytes, device = storage.nbytes(), str(storage.device)
                row = TensorRow(name, OTHERS, (n_bytes,), "uint8", device, n_bytes)
                self._identities[key_of(storage)] = weakref.ref(storage)
                self._members[key_of(storage)] = [_Member(row, n_bytes, _Held(name, "unknown"))]

    def _home(self, key: int) -> int:
        """The storage whose bytes a storage lies in; mostly itself."""
        return self._homes.get(key, key)

    def _entry(self, key: int) -> StorageEntry:
        members = self._members[key]
        owner = members[0].row
        rest = (replace(m.row, n_bytes=0, owner=owner.name) for m in members[1:])
        shown_bytes = max(member.tensor_bytes for member in members)
        return StorageEntry(
            (owner, *rest),
            self._identities[key],
            shown_bytes,
            members[0].held.kind,
            any(member.has_graph for member in members),
        )


def _homes(kept: Iterable[NamedTensor]) -> dict[int, int]:
    homes: dict[int, int] = {}
    for named in kept:
        home = storage_key(named.tensor)
        if home is not None:
            homes.update((key_of(storage), home) for storage in named.inside)
    return homes


def _best(found: Sequence[Holder]) -> _Held | None:
    named = [holder for holder in found if holder.named]
    direct = [holder for holder in named if holder.kind not in _BORROWING]
    best = next(iter(direct or named), None)
    return None if best is None else _Held(best.chain, best.kind)


def _row(name: str, category: str, t: Tensor, site: str | None) -> TensorRow:
    dtype = dtype_name(dtype_of(t))
    return TensorRow(name, category, shape_or_empty(t), dtype, str(device_of(t)), 0, None, site)


def _member_of(record: SavedRecord) -> _Member:
    name = listed(record.saved_by, 1)
    dtype, device = dtype_name(record.dtype), str(record.device)
    row = TensorRow(
        name, SAVED, record.shape, dtype, device, record.n_bytes, None, record.created_at
    )
    return _Member(row, record.n_bytes, _Held(name, "autograd"))


def _inner_of(t: Tensor) -> list[Tensor]:
    if is_plain(t):
        return []
    return [part.tensor for part in parts_of(t) if part.tensor is not t]


def _is_hollow(t: Tensor) -> bool:
    """Whether a tensor shows sizes without memory behind them, and is not just empty."""
    return bool(storage_bytes(t))
