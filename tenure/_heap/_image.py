"""One moment of the heap: its tensors, storages, modules, optimizers, and what C++ holds of them.

One pass finds the objects. Only C++ knows that a tensor has a view, a gradient, or what autograd
saved: a walk over all graphs finds that, when it is first asked for.

Invariant: the image has exactly one reference to each object in it. Who counts references asks
``found in image``.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from tenure._storages import storage_key

from ._collector import judged, tracked_objects
from ._graphs import Graphs
from ._nodes import below, is_node_class
from ._reading import (
    cpp_references,
    gradient_of,
    is_kind,
    read,
    references_beside,
    spans_storage,
    type_name,
)
from ._words import Step

_VIEW = Step("", "view", anchor="a view", link=" in ")
_WHOLE_VIEW = _VIEW._replace(whole=True)
_GRADIENT = Step(".grad", "attribute")
_KINDS = (Tensor, nn.Module, Optimizer, UntypedStorage)
_NODE = "node"


class _Reference(NamedTuple):
    """A reference that C++ has, by the number of the tensor whose life it shares."""

    owner: int
    step: Step


class Root(NamedTuple):
    """Where a graph begins: a node, and the number of a tensor that leads to it, if any does."""

    node: Any
    owner: int | None


class Image:
    """What is alive now.

    Args:
        beside: what else of ours has one reference to some objects.

    Attributes:
        tensors: all tensors with a handle in Python, in the order of the collector.
        modules: all modules.
        optimizers: all optimizers.
        storages: all storages with a handle in Python.
        nodes: the nodes of autograd with a handle in Python.
        in_python: the tensors that something in Python holds, by identity. An earlier search may
            have given a handle to what only autograd has.
    """

    def __init__(self, beside: Container[object] = ()) -> None:
        found: dict[object, list[Any]] = {kind: [] for kind in (*_KINDS, _NODE)}
        for each, kind in judged(tracked_objects(), _kind_of):
            found[kind].append(each)
            # the lists have the one reference of ours
            del each
        self.lists = tuple(found.values())
        self.tensors, self.modules, self.optimizers, self.storages, self.nodes = self.lists
        counts = references_beside(self.tensors)
        self.in_python = frozenset(
            id(t)
            for t, count in zip(self.tensors, counts, strict=True)
            if count - (t in beside) > cpp_references(t)
        )
        self._ids = frozenset(id(each) for some in self.lists for each in some)
        self._is_walked = False
        self._by_id: defaultdict[int, list[_Reference]] = defaultdict(list)
        self._by_storage: defaultdict[int, list[_Reference]] = defaultdict(list)
        self._over: defaultdict[int, list[int]] | None = None

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._ids

    def roots(self) -> list[Root]:
        """The nodes that tensors and variables lead to; those that no other leads to come first."""
        # A node can be held without its tensor (by a hook, in a variable), and a tensor's node can
        # be one that Python has no object for yet.
        found: dict[int, Root] = {}
        for owners in (self.tensors, map(gradient_of, self.tensors)):
            for number, t in enumerate(owners):
                node = None if t is None else read(t, "grad_fn")
                if node is not None:
                    found.setdefault(id(node), Root(node, number))
        for node in self.nodes:
            found.setdefault(id(node), Root(node, None))
        # The tensor at the top of a graph is what has to be dropped: below a loss, every result
        # that a variable still has would be named for its part. See
        # test_what_a_graph_saved_is_told_with_the_tensor_at_its_top.
        inner = below(root.node for root in found.values())
        return sorted(found.values(), key=lambda root: (self._rank(root), id(root.node) in inner))

    def walk(self, *, follow: bool = True) -> tuple[Graphs, list[Tensor | None]]:
        """Walk all graphs; for each root a tensor that leads to it, if there is one.

        Args:
            follow: as for ``Graphs``.
        """
        roots = self.roots()
        graphs = Graphs((root.node for root in roots), beside=self, follow=follow)
        owners = [root.owner for root in roots]
        if not self._is_walked:
            self._is_walked = True
            self._note(graphs, owners)
        return graphs, [None if owner is None else self.tensors[owner] for owner in owners]

    def owners_of(self, held: object) -> Iterator[tuple[object, Step]]:
        """Tensors that hold this tensor or graph node itself, and how."""
        return self._others(held, self._known().get(id(held), ()))

    def sharers_of(self, t: Tensor) -> Iterator[tuple[object, Step]]:
        """Tensors whose graph saved the memory of this one under another handle."""
        self._known()
        key = storage_key(t)
        return self._others(t, self._by_storage.get(key, ()) if key is not None else ())

    def handles_over(self, t: Tensor) -> list[Tensor]:
        """The other handles to the memory of a tensor that are no views, its base aside."""
        if self._over is None:
            self._over = defaultdict(list)
            for owner, other in enumerate(self.tensors):
                key = storage_key(other) if id(other) in self.in_python else None
                if key is not None and read(other, "_base") is None:
                    self._over[key].append(owner)
        key, base = storage_key(t), read(t, "_base")
        found = () if key is None else (self.tensors[n] for n in self._over.get(key, ()))
        return [other for other in found if other is not t and other is not base]

    def _rank(self, root: Root) -> int:
        """A tensor that Python holds before one that a graph or C++ has, and that before none.

        What another graph has saved may have a graph of its own, as the copy has that an operation
        in place makes: see the planted "gradients with graphs".
        """
        if root.owner is None:
            return 2
        return int(id(self.tensors[root.owner]) not in self.in_python)

    def _known(self) -> dict[int, list[_Reference]]:
        if not self._is_walked:
            self.walk(follow=False)
        return self._by_id

    def _others(
        self, held: object, references: Iterable[_Reference]
    ) -> Iterator[tuple[object, Step]]:
        for owner, step in references:
            if self.tensors[owner] is not held:
                yield self.tensors[owner], step

    def _note(self, graphs: Graphs, owners: list[int | None]) -> None:
        """Note who holds what in C++, by identity; nothing of the graphs is kept."""
        steps = {
            key: Step("", "autograd", anchor=type_name(type(node)), link=" in the graph of ")
            for key, node in graphs.nodes.items()
        }
        for key, root in graphs.roots_of_nodes.items():
            if (owner := owners[root]) is not None:
                self._by_id[key].append(_Reference(owner, steps[key]))
        inner: set[int] = set()
        for saved in graphs.saved:
            owner = owners[saved.root]
            if saved.tensor not in self.in_python:
                inner.add(saved.tensor)
            if owner is None:
                continue
            step = steps[saved.node]._replace(anchor=f"{saved.name} (saved {saved.label})")
            if saved.tensor in self._ids:
                self._by_id[saved.tensor].append(_Reference(owner, step))
            if saved.tensor not in self.in_python:
                # a node keeps its own output under a second handle, to avoid a cycle; and of a view
                # that no variable has, the user knows the base
                if saved.base in self._ids:
                    self._by_id[saved.base].append(_Reference(owner, step))
                if saved.key is not None:
                    shared = _Reference(owner, step._replace(shares=True))
                    self._by_storage[saved.key].append(shared)
        for owner, t in enumerate(self.tensors):
            if id(t) not in inner:
                self._note_tensor(owner, t)

    def _note_tensor(self, owner: int, t: Tensor) -> None:
        base = read(t, "_base")
        if base is not None:
            step = _WHOLE_VIEW if spans_storage(t) else _VIEW
            self._by_id[id(base)].append(_Reference(owner, step))
        gradient = gradient_of(t)
        if gradient is not None:
            self._by_id[id(gradient)].append(_Reference(owner, _GRADIENT))


def _kind_of(cls: type) -> object:
    """What the instances of a class are to the image."""
    kind = next((kind for kind in _KINDS if is_kind(cls, kind)), None)
    return _NODE if kind is None and is_node_class(cls) else kind
