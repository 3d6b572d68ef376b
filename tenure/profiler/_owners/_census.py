"""Who has which storage: every tensor of the process by name and category, each storage once.

Invariant: a storage counts in exactly one row, that of its owner; every other row over it names the
owner. The answer is text, numbers and weak references to storages.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage, nn

from tenure._callers import created_at
from tenure._cells import is_of_shell
from tenure._heap import (
    IN_CYCLE,
    Holder,
    Image,
    collector_paused,
    find_holders,
    gradient_of,
    is_kind,
    type_name,
)
from tenure._registries import NamedTensor, namers
from tenure._storages import element_bytes, is_hollow, storage_bytes, storage_key
from tenure._text import dtype_name, listed
from tenure._torch.quiet import quietly
from tenure._torch.storages import key_of

from ._naming import PARAMETERS, TensorName, names_of, outermost, tensors_of
from ._parts import device_of, dtype_of, identity_of, is_plain, parts_of, shape_or_empty
from ._rows import CATEGORIES, GRADIENTS, OTHERS, SAVED, StorageEntry, TensorRow
from ._saved import SavedStorage, saved_storages

# A search takes some 100 microseconds and 3 KiB for each tensor.
_MAX_SEARCHED = 100_000
# Kinds of holders that hold a tensor's memory on somebody else's behalf: a name of its own is
# better.
_BORROWING = frozenset({"view", "autograd", "numpy"})


def take_census(models: Iterable[nn.Module] = (), *, named: bool = True) -> list[StorageEntry]:
    """List every storage in the order of its owner's category; meta and fake tensors have none.

    Args:
        models: modules whose names come without the name of their class.
        named: whether variables are searched for the names of other tensors, which takes most of
            the time; their categories are known without.
    """
    # thousands of objects are made for each thousand of tensors, among which there is no garbage
    with quietly(), collector_paused():
        # First, so that the handles a pager makes for this answer are among the tensors found.
        kept = [
            (namer.served_model(), named)
            for namer in namers.alive()
            for named in namer.named_tensors()
        ]
        image = Image()
        saved = saved_storages(*image.walk(), image)
        names = names_of(list(models), image.modules, image.optimizers, kept)
        census = _Census(names, image, _homes(named for _, named in kept))
        if named:
            census.search({id(each.top()) for each in saved.values() if each.top is not None})
        census.enter_handles()
        census.enter_saved(saved)
        census.enter_rest()
        return census.entries()


class _StorageTensor(NamedTuple):
    """One tensor over a storage.

    Attributes:
        key: the storage, while it lives.
        identity: a weak reference to it.
        row: the tensor, with all bytes of the storage.
        tensor_bytes: those that it shows.
        held: what it is called.
    """

    key: int
    identity: weakref.ref[UntypedStorage] | None
    row: TensorRow
    tensor_bytes: int
    held: TensorName

    @property
    def rank(self) -> tuple[int, int, int, int, str]:
        """Named parameters, buffers and so on in their order; the rest by size."""
        row = self.row
        # What a pager says of its memory ("paged: ring") is no category of ours, and goes first.
        category = CATEGORIES.index(row.category) if row.category in CATEGORIES else -1
        return category, self.held.order, -row.n_bytes, -self.tensor_bytes, row.name


class _Census:
    """The tensors over each storage; each is called by a module, a holder, or a number.

    Args:
        names: the names that modules and optimizers give, by identity; others are added.
        image: the image of this moment.
        homes: the storages that lie in another, by the key of each that of the other.
    """

    def __init__(self, names: dict[int, TensorName], image: Image, homes: dict[int, int]) -> None:
        self._held = names
        self._image = image
        self._homes = homes
        self._members: defaultdict[int, list[_StorageTensor]] = defaultdict(list)
        self._entered: set[int] = set()
        # gradients by identity, each with the number of the tensor by which it is named
        gradients = ((i, gradient_of(t)) for i, t in enumerate(image.tensors))
        self._gradients = {id(gradient): i for i, gradient in gradients if gradient is not None}
        # what a sparse tensor or a wrapper is made of is named by that
        self._inner = {id(inner) for t in image.tensors for inner in _inner_of(t)}
        self._numbers = itertools.count()

    def search(self, tops: set[int]) -> None:
        """Name the largest of the tensors that have no name yet, and those of garbage.

        Args:
            tops: the tensors that hold graphs, by identity.
        """
        image = self._image
        unnamed = [
            t
            for t in image.tensors
            if id(t) in image.in_python and self._stands_alone(t) and id(t) not in self._held
        ]
        # What holds a graph is small and holds much. No variable is left that has one of them.
        unnamed.sort(key=lambda t: (id(t) not in tops, -(storage_bytes(t) or 0)))
        # The largest are worth the search; the rest get a number.
        del unnamed[_MAX_SEARCHED:]
        # optimizers first, because their state has the names of parameters
        owners = [*image.optimizers, *outermost(image.modules)]
        found = find_holders([*owners, *unnamed], ignore=(owners, unnamed), image=image)
        for t, holders in zip(map(id, unnamed), found[len(owners) :], strict=True):
            if (best := _best(holders)) is not None:
                self._held[t] = best
        self._name_garbage(owners, found)

    def _name_garbage(self, owners: list[Any], found: list[list[Holder]]) -> None:
        """Name the tensors of modules and optimizers that only a reference cycle holds."""
        named = [
            entry
            for owner, holders in zip(owners, found, strict=False)
            if _is_garbage(holders)
            for entry in tensors_of(owner, holders[0].chain.removesuffix(IN_CYCLE), self._held)
        ]
        if not named:
            return
        tensors = [t for _, t in named]
        # a module that lives may have a part of one that does not
        objects = [*tensors, *owners]
        found = find_holders(objects, ignore=(tensors, owners, *named), image=self._image)
        for (name, t), holders in zip(named, found, strict=False):
            if _is_garbage(holders):
                self._held[id(t)] = self._held[id(t)]._replace(name=name, kind="cycle")

    def enter_handles(self) -> None:
        """Enter what Python holds, and gradients."""
        for t in self._image.tensors:
            held, gradient = self._held.get(id(t)), gradient_of(t)
            category = held.category if held else ""
            # What neither Python holds nor a module names is C++'s alone: a graph's, entered under
            # its node by `enter_saved`, or somebody's whom nothing shows, by `enter_rest`.
            if (category or id(t) in self._image.in_python) and self._stands_alone(t):
                # A Parameter outside of every module is one all the same, as in a hand-written
                # optimizer.
                other = PARAMETERS if is_kind(type(t), nn.Parameter) else OTHERS
                self._enter(t, category or other)
            if gradient is not None:
                self._enter(gradient, GRADIENTS)

    def enter_saved(self, saved: dict[int, SavedStorage]) -> None:
        """Enter what only a graph keeps; what it shares with a variable is the graph's as well."""
        for key, (record, identity, top) in saved.items():
            root = None if top is None else top()
            graph = None if root is None else self._called(root).name
            members = self._over(key)
            # A variable and a graph share it: dropping the variable alone would free nothing, so it
            # counts as saved.
            if members and not record.is_leaf:
                first = min(members, key=lambda member: member.rank)
                # A parameter that a graph saves is a parameter.
                if first.row.category == OTHERS:
                    row = replace(first.row, category=SAVED, graph=graph)
                    members[members.index(first)] = first._replace(
                        row=row, tensor_bytes=row.n_bytes
                    )
            elif not members:
                name = listed(record.saved_by, 1)
                dtype, device = dtype_name(record.dtype), str(record.device)
                n_bytes, site = record.n_bytes, record.created_at
                row = TensorRow(
                    name, SAVED, record.shape, dtype, device, n_bytes, None, site, graph
                )
                held = TensorName(name, kind="autograd")
                members.append(_StorageTensor(key, identity, row, n_bytes, held))

    def enter_rest(self) -> None:
        """Enter memory that only C++ refers to, and bare storages."""
        for t in self._image.tensors:
            if id(t) not in self._entered and not all(self._over(p.key) for p in parts_of(t)):
                self._enter(t, OTHERS)
        for storage in self._image.storages:
            n_bytes, members = storage.nbytes(), self._over(key_of(storage))
            # A storage that the program holds by itself: no tensor lies over it any more.
            if n_bytes and not members and not is_hollow(storage):
                held = self._numbered("UntypedStorage")
                device = str(storage.device)
                row = TensorRow(held.name, OTHERS, (n_bytes,), "uint8", device, n_bytes)
                identity = weakref.ref(storage)
                members.append(_StorageTensor(key_of(storage), identity, row, n_bytes, held))

    def entries(self) -> list[StorageEntry]:
        """Return the storages in the order of their owners' categories."""
        found = [(key, members) for key, members in self._members.items() if members]
        for _, members in found:
            if len(members) > 1:
                # what lives keeps the storage of what is garbage
                members.sort(key=lambda member: (member.held.kind == "cycle", member.rank))
        found.sort(key=lambda entry: entry[1][0].rank)
        return [_entry(key, members) for key, members in found]

    def _over(self, key: int) -> list[_StorageTensor]:
        """Return the tensors over a storage, or over the one that its bytes lie in."""
        # A unit of a pager lies in its buffer: its bytes are the buffer's, and counted once there.
        return self._members[self._homes.get(key, key)]

    def _enter(self, t: Tensor, category: str) -> None:
        """Enter each part of a tensor."""
        self._entered.add(id(t))
        held, site = self._called(t), created_at(t)
        for part in parts_of(t):
            tensor = part.tensor
            row = _row(held.name + part.label, category, tensor, site, part.n_bytes)
            member = _StorageTensor(part.key, identity_of(tensor), row, element_bytes(tensor), held)
            self._over(part.key).append(member)

    def _stands_alone(self, t: Tensor) -> bool:
        """Return whether a tensor has a name of its own."""
        return id(t) not in self._gradients and id(t) not in self._inner

    def _called(self, t: Tensor) -> TensorName:
        """Return the name of an object, the same for each call."""
        # A gradient in a variable of its own is one still.
        number = self._gradients.get(id(t))
        if number is not None:
            held = self._itself(self._image.tensors[number])
            return held._replace(name=f"{held.name}.grad")
        return self._itself(t)

    def _itself(self, t: Tensor) -> TensorName:
        if id(t) not in self._held:
            self._held[id(t)] = self._numbered(type_name(type(t)))
        return self._held[id(t)]

    def _numbered(self, kind: str) -> TensorName:
        """Return a name for one that nothing else tells from the others."""
        return TensorName(f"{kind}{next(self._numbers)}", kind="unknown")


def _entry(key: int, members: list[_StorageTensor]) -> StorageEntry:
    owner = members[0].row
    # of the storage itself, and not of one whose bytes lie in it
    own = (member.identity for member in members if member.key == key)
    return StorageEntry(
        owner,
        max(member.tensor_bytes for member in members),
        members[0].held.kind,
        tuple(replace(m.row, owner=owner.name) for m in members[1:]),
        next(own, members[0].identity),
    )


def _row(name: str, category: str, t: Tensor, site: str | None, n_bytes: int) -> TensorRow:
    dtype, device = dtype_name(dtype_of(t)), str(device_of(t))
    return TensorRow(name, category, shape_or_empty(t), dtype, device, n_bytes, None, site)


def _homes(kept: Iterable[NamedTensor]) -> dict[int, int]:
    homes: dict[int, int] = {}
    for named in kept:
        home = storage_key(named.tensor)
        if home is not None:
            homes.update((key_of(storage), home) for storage in named.inside)
    return homes


def _is_garbage(holders: Sequence[Holder]) -> bool:
    return bool(holders) and all(holder.kind == "cycle" for holder in holders)


def _best(found: Sequence[Holder]) -> TensorName | None:
    named = [holder for holder in found if holder.named]
    direct = [holder for holder in named if holder.kind not in _BORROWING]
    told = [holder for holder in direct if not is_of_shell(holder.chain)]
    best = next(iter(told or direct or named), None)
    return None if best is None else TensorName(best.chain, kind=best.kind)


def _inner_of(t: Tensor) -> list[Tensor]:
    if is_plain(t):
        return []
    return [part.tensor for part in parts_of(t) if part.tensor is not t]
