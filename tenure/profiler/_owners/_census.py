"""Who has which storage: every tensor of the process by name and category, each storage once.

Invariant: a storage counts in exactly one row, that of its owner; every other row over it names the
owner. The answer is text, numbers and weak references to storages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from tenure._callers import created_at
from tenure._cells import is_of_shell
from tenure._heap import (
    Holder,
    Image,
    find_holders,
    gradient_of,
    is_kind,
    read,
    type_name,
)
from tenure._registries import NamedTensor, namers
from tenure._storages import element_bytes, is_hollow, storage_bytes, storage_key
from tenure._text import dtype_name, listed
from tenure._torch.quiet import quietly
from tenure._torch.storages import key_of

from ._naming import PARAMETERS, Held, Kept, Names
from ._parts import device_of, dtype_of, identity_of, is_plain, parts_of, shape_or_empty
from ._rows import GRADIENTS, OTHERS, SAVED, Member, StorageEntry, Storages, TensorRow
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
        # First, so that the handles a pager makes for this answer are among the tensors found.
        kept = [
            Kept(namer.served_model(), named)
            for namer in namers.alive()
            for named in namer.named_tensors()
        ]
        image = Image()
        saved, roots = _saved_of(image)
        names = Names(list(models), image.modules, [*optimizers, *image.optimizers], kept)
        calls = _Calls(names, image)
        if named:
            calls.search(roots)
        storages = Storages(_homes(each.named for each in kept))
        hollow = _enter_handles(storages, image, calls)
        _enter_saved(storages, saved, roots, calls)
        _enter_rest(storages, image, calls)
        return storages.entries(), sorted(hollow, key=lambda row: row.name)


_Saved = dict[int, SavedStorage]
_Roots = dict[int, weakref.ref[Tensor]]


def _saved_of(image: Image) -> tuple[_Saved, _Roots]:
    """What graphs have saved by storage, and the tensor whose graph it is where one leads there.

    Text and weak references: a reference of ours to a node would hide that a cycle through its
    context is garbage.
    """
    graphs, tops = image.walk()
    saved = saved_storages(graphs, image)
    found = {key: tops[entry.root] for key, entry in saved.items()}
    return saved, {key: weakref.ref(t) for key, t in found.items() if t is not None}


class _Calls:
    """What tensors are called: by a module or an optimizer, by a holder, or by a number."""

    def __init__(self, names: Names, image: Image) -> None:
        self.names = names
        self._image = image
        # gradients by identity, each with the number of the tensor by which it is named
        gradients = ((i, gradient_of(t)) for i, t in enumerate(image.tensors))
        self._gradients = {id(gradient): i for i, gradient in gradients if gradient is not None}
        # what a sparse tensor or a wrapper is made of is named by that
        self._inner = {id(inner) for t in image.tensors for inner in _inner_of(t)}
        self._held: dict[int, Held] = {}
        self._n_unnamed = 0

    def search(self, roots: _Roots) -> None:
        """Name the largest of the tensors that no module and no optimizer has a name for."""
        image = self._image
        unnamed = [
            t
            for t in image.tensors
            if id(t) in image.in_python and self.stands_alone(t) and self.names.get(t) is None
        ]
        # What holds a graph is small and holds much. No variable is left that has one of them.
        tops = {id(root()) for root in roots.values()}
        unnamed.sort(key=lambda t: (id(t) not in tops, -(storage_bytes(t) or 0)))
        # The largest are worth the search; the rest get a number.
        del unnamed[_MAX_SEARCHED:]
        for t, found in zip(map(id, unnamed), find_holders(unnamed, image=image), strict=True):
            if (best := _best(found)) is not None:
                self._held[t] = best

    def stands_alone(self, t: Tensor) -> bool:
        """Whether a tensor has a name of its own."""
        return id(t) not in self._gradients and id(t) not in self._inner

    def of(self, t: Tensor) -> Held:
        """What it is called; the same at each call."""
        # A gradient in a variable of its own is one still.
        number = self._gradients.get(id(t))
        if number is None:
            return self._itself(t)
        held = self._itself(self._image.tensors[number])
        return held._replace(name=f"{held.name}.grad")

    def _itself(self, t: Tensor) -> Held:
        held = self.names.get(t) or self._held.get(id(t))
        if held is None:
            held = self._held[id(t)] = self.numbered(type_name(type(t)))
        return held

    def numbered(self, kind: str) -> Held:
        """A name for one that nothing else tells from the others."""
        self._n_unnamed += 1
        return Held(f"{kind}{self._n_unnamed - 1}", kind="unknown")


def _enter_handles(storages: Storages, image: Image, calls: _Calls) -> list[TensorRow]:
    """What Python holds, and gradients; those without memory are given back."""
    hollow: list[TensorRow] = []
    for t in image.tensors:
        named, gradient = calls.names.get(t), gradient_of(t)
        # What neither Python holds nor a module names is C++'s alone: a graph's, entered under its
        # node by `_enter_saved`, or somebody's whom nothing shows, by `_enter_rest`.
        if (named or id(t) in image.in_python) and calls.stands_alone(t):
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
    saved: _Saved,
    roots: _Roots,
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


def _enter_rest(storages: Storages, image: Image, calls: _Calls) -> None:
    """Memory that only C++ refers to, and bare storages."""
    for t in image.tensors:
        if not all(storages.at(part.key) for part in parts_of(t)):
            _enter(storages, t, calls.of(t), OTHERS)
    for storage in image.storages:
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
    return None if best is None else Held(best.chain, kind=best.kind)


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
    return Member(key, identity, row, record.n_bytes, Held(name, kind="autograd"))


def _inner_of(t: Tensor) -> list[Tensor]:
    if is_plain(t):
        return []
    return [part.tensor for part in parts_of(t) if part.tensor is not t]
