"""Tensors and containers that modules hold, noted so that what is put into them can be taken back.

Invariant: a note of a tensor that nobody writes takes no memory, as far as torch can copy it lazily
(``tenure._torch.writes``). One that was written once is copied at once from then on, so that it
does not move to other memory each time. Of containers only the methods of the builtin classes are
called: a class of the user's may refuse to be cleared, or may want other arguments to make a copy.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tenure._storages import all_storages_of
from tenure._torch.modules import NormBase
from tenure._torch.quiet import without_dispatch
from tenure._torch.writes import lazy_copy, share_memory, version_of, write_back
from tenure.scopes import is_disposed


class TensorNote(NamedTuple):
    """A tensor as it was.

    Attributes:
        owner: the module that holds it.
        name: what the module calls it.
        tensor: it.
        version: how often it had been written.
        copy: its values.
        is_lazy: whether the copy took no memory when it was made.
    """

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int | None
    copy: Tensor
    is_lazy: bool

    def was_left_alone(self) -> bool:
        """Return whether it certainly has the values that it had."""
        same_version = version_of(self.tensor) == self.version
        return self.is_lazy and same_version and share_memory(self.tensor, self.copy)

    def has_other_version(self) -> bool:
        """Return whether an operation has written it and said so; batch norm does not."""
        return self.version is not None and version_of(self.tensor) != self.version

    def undo(self) -> None:
        """Write its values back."""
        if self.was_left_alone():
            return
        # a cache that grew in place, as of keys and values
        if self.tensor.shape != self.copy.shape:
            with torch.no_grad():
                self.tensor.resize_(self.copy.shape)
        write_back(self.tensor, self.copy, self.version)


_written: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""What has been written since its lazy copy was made, or had its address taken."""


def noted(owner: nn.Module, name: str, tensor: Tensor) -> TensorNote:
    """Note a tensor of a module; to be called without gradients, in ``persist()``."""
    copy = None
    if not _is_written(owner, name):
        # it takes no memory, and no budget is to count it
        with without_dispatch():
            copy = lazy_copy(tensor)
    is_lazy = copy is not None
    if copy is None:
        copy = tensor.detach().clone()
    return TensorNote(owner, name, tensor, version_of(tensor), copy, is_lazy)


def has_values(tensor: Tensor) -> bool:
    """Return whether there are values to note: none of a disposed or a recorded tensor."""
    return type(tensor) is Tensor or (not is_disposed(tensor) and bool(all_storages_of(tensor)))


def is_gone(tensor: Tensor) -> bool:
    """Return whether a tensor is disposed."""
    return type(tensor) is not Tensor and is_disposed(tensor)


def remember_written(notes: Iterable[TensorNote]) -> None:
    """Learn from notes that are no longer needed."""
    for note in notes:
        if note.is_lazy and not share_memory(note.tensor, note.copy):
            _written.setdefault(note.owner, set()).add(note.name)


def differing(pairs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return whether the values of two tensors differ, of each pair; asks each device once.

    Two that are both nan don't.
    """
    answers = [False] * len(pairs)
    flags: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, (one, other) in enumerate(pairs):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            answers[i] = True
        elif type(one) is Tensor and type(other) is Tensor and one.layout is torch.strided:
            same = (one == other) | ((one != one) & (other != other))
            flags.setdefault(one.device, []).append((i, same.all()))
        else:
            answers[i] = not torch.equal(one, other)
    for found in flags.values():
        same_values = torch.stack([flag for _, flag in found]).tolist()
        for (i, _), is_same in zip(found, same_values, strict=True):
            answers[i] = not is_same
    return answers


def _is_written(owner: nn.Module, name: str) -> bool:
    # batch norm in training writes its statistics with each call: a lazy copy would be made in vain
    if isinstance(owner, NormBase):
        return bool(owner.training)
    return name in _written.get(owner, ())


# --- containers


class _ContainerKind(NamedTuple):
    """How containers of a class are read and filled.

    Attributes:
        base: the class.
        read: a copy of what is in one, of a class of Python's own.
        fill: puts such a copy into one that is empty.
    """

    base: Any
    read: Callable[[Any], dict[Any, Any] | list[Any]]
    fill: Callable[[Any, Any], object]


def _fill_in_order(container: OrderedDict[Any, Any], items: dict[Any, Any]) -> None:
    # update() would call what a class writes over
    for key, value in items.items():
        OrderedDict.__setitem__(container, key, value)


_KINDS = (
    _ContainerKind(OrderedDict, lambda each: dict(OrderedDict.items(each)), _fill_in_order),
    _ContainerKind(dict, dict.copy, dict.update),
    _ContainerKind(list, list.copy, list.extend),
    _ContainerKind(set, lambda each: list(set.__iter__(each)), set.update),
    _ContainerKind(deque, lambda each: list(deque.__iter__(each)), deque.extend),
)
_CLASSES = tuple(kind.base for kind in _KINDS)


class ContainerNote(NamedTuple):
    """A container as it was.

    Attributes:
        container: it.
        kind: how it is filled.
        items: what was in it.
        attributes: the attributes that it has beside that, where its class allows them.
    """

    container: Any
    kind: _ContainerKind
    items: dict[Any, Any] | list[Any]
    attributes: dict[str, Any] | None

    def is_same(self) -> bool:
        """Return whether it holds the same objects in the same order."""
        now = self.kind.read(self.container)
        if len(now) != len(self.items):
            return False
        if isinstance(now, dict) and not all(map(operator.is_, now, self.items)):
            return False
        pairs = zip(entries(now), entries(self.items), strict=True)
        return all(one is other for (_, one), (_, other) in pairs)

    def undo(self) -> None:
        """Put back what was in it."""
        self.kind.base.clear(self.container)
        self.kind.fill(self.container, self.items)
        if self.attributes is not None:
            space = self.container.__dict__
            space.clear()
            space.update(self.attributes)


def noted_container(value: object) -> ContainerNote | None:
    """Note a dict, list, set or deque; None for anything else."""
    # isinstance() asks a weak proxy, and one of nothing raises
    cls = type(value)
    if not issubclass(cls, _CLASSES):
        return None
    kind = next(kind for kind in _KINDS if issubclass(cls, kind.base))
    attributes = getattr(value, "__dict__", None)
    return ContainerNote(
        value, kind, kind.read(value), None if attributes is None else dict(attributes)
    )


def entries(items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Return the entries of a plain container, by key or index."""
    return iter(items.items()) if isinstance(items, dict) else enumerate(items)
