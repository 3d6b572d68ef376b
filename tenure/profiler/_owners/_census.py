"""Who has which storage: every tensor of the process by name and category, each storage once.

Invariant: a storage counts in exactly one row, that of its owner; every other row over it names the
owner. The answer is text, numbers and weak references to storages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from tenure._callers import created_at
from tenure._cells import is_of_shell
from tenure._heap import (
    Holder,
    cpp_references,
    find_holders,
    gradient_of,
    instances,
    is_kind,
    is_node_class,
    read,
    references_beside,
    tracked_objects,
    type_name,
)
from tenure._registries import NamedTensor, namers
from tenure._storages import element_bytes, is_hollow, storage_bytes, storage_key
from tenure._text import dtype_name, listed
from tenure._torch.quiet import quietly
from tenure._torch.storages import key_of

from ._graph_roots import Graph, Roots, graphs_of, roots_of
from ._naming import PARAMETERS, Kept, Named, Names
from ._parts import device_of, dtype_of, identity_of, is_plain, parts_of, shape_or_empty
from ._rows import GRADIENTS, OTHERS, SAVED, Held, Member, StorageEntry, Storages, TensorRow
from ._saved import SavedRecord, SavedStorage, saved_storages

# A search costs some microseconds for each tensor; a process with a million small ones would wait
# for names that nobody reads.
_MAX_SEARCHED = 5000
# Kinds of holders that hold a tensor's memory on somebody else's behalf: a name of its own is
# better.
_BORROWING = frozenset({"view", "autograd", "numpy"})
_SELVES = ("Tensor", "Parameter")


def take_census(
    models: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = (), *, named: bool = True
) -> tuple[list[StorageEntry], list[TensorRow]]:
    """List every storage, and the tensors that have none (meta, fake).

    Args:
        models: modules whose names come without the name of their class.
        optimizers: optimizers whose state is named.
        named: whether variables are searched for the names of other tensors, which takes most of
            the time; their categories are known without.

    Returns:
        The storages in the order of their owners' categories, and rows of tensors without memory.
    """
    with quietly():
        heap = _look()
        # Before any handle is held: what only a graph has is told by counts of references.
        saved = saved_storages(node for node, _ in heap.graphs)[0]
        names = Names(list(models), heap.modules, [*optimizers, *heap.optimizers], heap.kept)
        handles = _handles_of(heap)
        roots = roots_of(saved, heap.graphs)
        # a reference of ours to a node would hide that a cycle through its context is garbage
        heap.graphs.clear()
        calls = _Calls(names, handles, _search(handles, names, roots) if named else {})
        storages = Storages(_homes(kept.named for kept in heap.kept))
        hollow = _enter_handles(storages, handles, calls)
        _enter_saved(storages, saved, roots, calls)
        _enter_rest(storages, handles, heap.storages, calls)
        return storages.entries(), sorted(hollow, key=lambda row: row.name)


@dataclass(frozen=True, slots=True)
class _Heap:
    """Tensors and what tells something of them, from one pass over the heap.

    Attributes:
        kept: the tensors that pagers and the like keep, which the pass has therefore seen.
        tensors: all tensors; weakly, as references of ours would hide that others hold them.
        graphs: the nodes that a tensor or a variable leads to, each with such a tensor; those that
            no other of them leads to come first.
        modules: all modules.
        optimizers: all optimizers.
        storages: the handles of storages.
    """

    kept: list[Kept]
    tensors: list[weakref.ref[Tensor]]
    graphs: list[Graph]
    modules: list[nn.Module]
    optimizers: list[Optimizer]
    storages: list[UntypedStorage]


def _look() -> _Heap:
    # First, so that the handles a pager makes for this answer are among the tensors of the pass.
    kept = [
        Kept(namer.served_model(), named)
        for namer in namers.alive()
        for named in namer.named_tensors()
    ]
    found = instances(tracked_objects(), _is_surveyed)
    tensors = instances(found, lambda cls: is_kind(cls, Tensor))
    nodes = instances(found, is_node_class)
    modules = instances(found, lambda cls: is_kind(cls, nn.Module))
    optimizers = instances(found, lambda cls: is_kind(cls, Optimizer))
    storages = instances(found, lambda cls: is_kind(cls, UntypedStorage))
    # the list of tensors is then the one reference of ours that `graphs_of` counts off
    del found
    references = list(map(weakref.ref, tensors))
    return _Heap(kept, references, graphs_of(tensors, nodes), modules, optimizers, storages)


def _is_surveyed(cls: type) -> bool:
    return is_kind(cls, Tensor, nn.Module, Optimizer, UntypedStorage) or is_node_class(cls)


@dataclass(frozen=True, slots=True)
class _Handles:
    """Every tensor, held while the census lasts.

    Attributes:
        tensors: the tensors.
        in_python: those that something in Python holds, by identity.
        gradients: the gradients among them by identity, each with the place of the tensor that it
            is the gradient of, and by which it is named.
        inner: those that a sparse tensor or a wrapper is made of, which are named by it.
    """

    tensors: list[Tensor]
    in_python: set[int]
    gradients: dict[int, int]
    inner: set[int]

    def stands_alone(self, t: Tensor) -> bool:
        """Whether a tensor has a name of its own."""
        return id(t) not in self.gradients and id(t) not in self.inner


def _handles_of(heap: _Heap) -> _Handles:
    # This list is the one reference of ours that is counted off: there must be no second one yet,
    # as a variable bound here by := would be to the last tensor; see
    # test_the_last_tensor_of_the_heap_is_named_like_the_others.
    tensors = [t for t in (reference() for reference in heap.tensors) if t is not None]
    others = references_beside(tensors)
    return _Handles(
        tensors,
        {id(t) for t, n in zip(tensors, others, strict=True) if n > cpp_references(t)},
        {id(g): i for i, t in enumerate(tensors) if (g := gradient_of(t)) is not None},
        {id(inner) for t in tensors for inner in _inner_of(t)},
    )


def _search(handles: _Handles, names: Names, roots: Roots) -> dict[int, Held]:
    """Name the largest of the tensors that no module and no optimizer has a name for."""
    unnamed = [
        t
        for t in handles.tensors
        if id(t) in handles.in_python and handles.stands_alone(t) and names.get(t) is None
    ]
    # What holds a graph is small and holds much. No variable is left that has one of them.
    tops = {id(root()) for root in set(roots.values())}
    unnamed.sort(key=lambda t: (id(t) not in tops, -(storage_bytes(t) or 0)))
    # The largest are worth the search; the rest get a number.
    del unnamed[_MAX_SEARCHED:]
    found = find_holders(unnamed, live=handles.tensors)
    held = zip(map(id, unnamed), map(_best, found), strict=True)
    return {key: best for key, best in held if best is not None}


class _Calls:
    """What tensors are called: by a module or an optimizer, by a holder, or by a number."""

    def __init__(self, names: Names, handles: _Handles, searched: dict[int, Held]) -> None:
        self._names = names
        self._handles = handles
        self._held = searched
        self._n_unnamed = 0

    def named(self, t: Tensor) -> Named | None:
        """What a module or an optimizer calls it."""
        return self._names.get(t)

    def of(self, t: Tensor) -> Held:
        """What it is called; the same at each call."""
        # A gradient in a variable of its own is one still.
        owner = self._owner_of(t)
        if owner is None:
            return self._itself(t)
        held = self._itself(owner)
        return held._replace(name=f"{held.name}.grad")

    def _owner_of(self, gradient: Tensor) -> Tensor | None:
        """What a tensor is the gradient of."""
        place = self._handles.gradients.get(id(gradient))
        return None if place is None else self._handles.tensors[place]

    def _itself(self, t: Tensor) -> Held:
        named = self._names.get(t)
        if named is not None:
            return Held(named.name, order=named.order)
        held = self._held.get(id(t))
        if held is None:
            held = self._held[id(t)] = self.numbered(type_name(type(t)))
        return held

    def numbered(self, kind: str) -> Held:
        """A name for one that nothing else tells from the others."""
        self._n_unnamed += 1
        return Held(f"{kind}{self._n_unnamed - 1}", "unknown")


def _enter_handles(storages: Storages, handles: _Handles, calls: _Calls) -> list[TensorRow]:
    """What Python holds, and gradients; those without memory are given back."""
    hollow: list[TensorRow] = []
    for t in handles.tensors:
        named, gradient = calls.named(t), gradient_of(t)
        # What neither Python holds nor a module names is C++'s alone: a graph's, entered under its
        # node by `_enter_saved`, or somebody's whom nothing shows, by `_enter_rest`.
        if (named or id(t) in handles.in_python) and handles.stands_alone(t):
            is_parameter = is_kind(type(t), nn.Parameter)
            # A Parameter outside of every module is one all the same, as in a hand-written
            # optimizer.
            category = named.category if named else PARAMETERS if is_parameter else OTHERS
            hollow += _enter(storages, t, calls.of(t), category)
        if gradient is not None:
            hollow += _enter(storages, gradient, calls.of(gradient), GRADIENTS)
    return hollow


def _enter(storages: Storages, t: Tensor, held: Held, category: str) -> list[TensorRow]:
    """Enter each part of a tensor; where it has none, its row is given back."""
    site, has_graph = created_at(t), read(t, "grad_fn") is not None
    parts = parts_of(t)
    for part in parts:
        row = _row(held.name + part.label, category, part.tensor, site)
        storages.add(
            Member(
                part.key,
                identity_of(part.tensor),
                replace(row, n_bytes=part.n_bytes),
                element_bytes(part.tensor),
                held,
                has_graph,
            )
        )
    # of a size, and not just empty
    is_hollow = not parts and storage_bytes(t)
    return [replace(_row(held.name, category, t, site), device="meta")] if is_hollow else []


def _enter_saved(
    storages: Storages,
    saved: dict[int, SavedStorage],
    roots: Roots,
    calls: _Calls,
) -> None:
    """What only a graph keeps; and what it shares with a variable is the graph's as well."""
    for key, (record, identity, _) in saved.items():
        members = storages.at(key)
        root = roots[key]() if key in roots else None
        graph = None if root is None else calls.of(root).name
        # A variable and a graph share it: dropping the variable alone would free nothing, so it
        # counts as saved; see test_a_variable_that_autograd_saved_counts_as_saved.
        if members and not record.is_leaf:
            first = min(members, key=lambda member: member.rank)
            # A parameter that a graph saves is a parameter.
            if first.row.category == OTHERS:
                row = replace(first.row, category=SAVED, graph=graph)
                members[members.index(first)] = first._replace(row=row, tensor_bytes=row.n_bytes)
        elif not members:
            storages.add(_member_of(key, record, identity, graph))


def _enter_rest(
    storages: Storages, handles: _Handles, bare: list[UntypedStorage], calls: _Calls
) -> None:
    """Memory that only C++ refers to, and bare storages."""
    for t in handles.tensors:
        if not all(storages.at(part.key) for part in parts_of(t)):
            _enter(storages, t, calls.of(t), OTHERS)
    for storage in bare:
        n_bytes = storage.nbytes()
        # A storage that the program holds by itself: no tensor lies over it any more.
        if n_bytes and not storages.at(key_of(storage)) and not is_hollow(storage):
            held = calls.numbered("UntypedStorage")
            row = TensorRow(held.name, OTHERS, (n_bytes,), "uint8", str(storage.device), n_bytes)
            storages.add(Member(key_of(storage), weakref.ref(storage), row, n_bytes, held))


def _homes(kept: Iterable[NamedTensor]) -> dict[int, int]:
    homes: dict[int, int] = {}
    for named in kept:
        home = storage_key(named.tensor)
        if home is not None:
            homes.update((key_of(storage), home) for storage in named.inside)
    return homes


def _best(found: Sequence[Holder]) -> Held | None:
    named = [holder for holder in found if holder.named]
    direct = [holder for holder in named if holder.kind not in _BORROWING]
    # a method of torch's own has it as `self`, which says less than any other variable
    told = [holder for holder in direct if not _says_little(holder.chain)]
    best = next(iter(told or direct or named), None)
    return None if best is None else Held(best.chain, best.kind)


def _says_little(chain: str) -> bool:
    return chain in _SELVES or is_of_shell(chain)


def _row(name: str, category: str, t: Tensor, site: str | None) -> TensorRow:
    dtype = dtype_name(dtype_of(t))
    return TensorRow(name, category, shape_or_empty(t), dtype, str(device_of(t)), 0, None, site)


def _member_of(
    key: int,
    record: SavedRecord,
    identity: weakref.ref[UntypedStorage] | None,
    graph: str | None,
) -> Member:
    name = listed(record.saved_by, 1)
    dtype, device = dtype_name(record.dtype), str(record.device)
    row = TensorRow(
        name, SAVED, record.shape, dtype, device, record.n_bytes, None, record.created_at, graph
    )
    return Member(key, identity, row, record.n_bytes, Held(name, "autograd"))


def _inner_of(t: Tensor) -> list[Tensor]:
    if is_plain(t):
        return []
    return [part.tensor for part in parts_of(t) if part.tensor is not t]
