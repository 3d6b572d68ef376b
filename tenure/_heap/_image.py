"""One moment of the heap: its tensors, storages, modules, optimizers, and what C++ holds of them.

One pass finds the objects. Only C++ knows that a tensor has a view, a gradient, or what autograd
saved: a walk over all graphs finds that, when it is first asked for.

Invariant: the image has exactly one reference to each object in it. Who counts references asks
``found in image``.
"""

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from tenure._storages import element_bytes, storage_bytes, storage_key

from ._collector import of_classes, subclasses_of, tracked_objects
from ._graphs import Graphs, inner_nodes, node_classes, walk_nodes
from ._reading import (
    cpp_references,
    gradient_of,
    read,
    references_beside,
    type_name,
)
from ._words import Step

_VIEW = Step("", "view", anchor="a view", link=" in ")
_WHOLE_VIEW = _VIEW._replace(whole=True)
_GRADIENT = Step(".grad", "attribute")
_KINDS = (Tensor, nn.Module, Optimizer, UntypedStorage)


# a reference that C++ has, by the number of the tensor whose life it shares
_Reference = tuple[int, Step]


class GraphRoot(NamedTuple):
    """Where a graph begins: a node, and the number of a tensor that leads to it, if any does."""

    node: Any
    owner: int | None


class Image:
    """What is alive now.

    Args:
        beside: what else of ours has one reference each to some objects.

    Attributes:
        tensors: all tensors with a handle in Python, in the order of the collector.
        modules: all modules.
        optimizers: all optimizers.
        storages: all storages with a handle in Python.
        nodes: the nodes of autograd with a handle in Python.
        in_python: the tensors that something in Python holds, by identity. An earlier search may
            have given a handle to what only autograd has.
    """

    def __init__(self, beside: Collection[Container[object]] = ()) -> None:
        self.lists = _instances_by_kind()
        self.tensors, self.modules, self.optimizers, self.storages, self.nodes = self.lists
        counts = references_beside(self.tensors)
        self.in_python = frozenset(
            id(t)
            for t, count in zip(self.tensors, counts, strict=True)
            if count - sum(t in each for each in beside) > cpp_references(t)
        )
        self._ids = frozenset(id(each) for some in self.lists for each in some)
        self._is_walked = False
        self._by_id: defaultdict[int, list[_Reference]] = defaultdict(list)
        self._by_storage: defaultdict[int | None, list[_Reference]] = defaultdict(list)

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._ids

    def roots(self) -> list[GraphRoot]:
        """Return the nodes that tensors and variables lead to, those of no other node first."""
        # A node can be held without its tensor (by a hook, in a variable), and a tensor's node can
        # be one that Python has no object for yet.
        found: dict[int, GraphRoot] = {}
        for owners in (self.tensors, map(gradient_of, self.tensors)):
            for number, t in enumerate(owners):
                node = None if t is None else read(t, "grad_fn")
                if node is not None:
                    found.setdefault(id(node), GraphRoot(node, number))
        for node in self.nodes:
            found.setdefault(id(node), GraphRoot(node, None))
        # The tensor at the top of a graph is what has to be dropped: below a loss, every result
        # that a variable still has would be named for its part.
        nodes = walk_nodes([root.node for root in found.values()], {})
        inner = frozenset(id(inner) for node in nodes for inner in inner_nodes(node))

        def rank(root: GraphRoot) -> tuple[bool, bool, bool]:
            # A tensor that Python holds first. What another graph has saved may have a graph of its
            # own, as the copy has that an operation in place makes: see the planted "gradients with
            # graphs".
            is_held = root.owner is not None and id(self.tensors[root.owner]) in self.in_python
            return root.owner is None, not is_held, id(root.node) in inner

        return sorted(found.values(), key=rank)

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
        return self._others(t, self._by_storage.get(storage_key(t), ()))

    def handles_over(self, t: Tensor) -> list[Tensor]:
        """Return the other handles to the memory of a tensor that are no views, its base aside."""
        base = read(t, "_base")
        found = (self.tensors[n] for n in self._handles.get(storage_key(t), ()))
        return [other for other in found if other is not t and other is not base]

    @cached_property
    def _handles(self) -> dict[int | None, list[int]]:
        """By storage the tensors that are no views and that Python holds."""
        found: dict[int | None, list[int]] = {}
        for number, t in enumerate(self.tensors):
            key = storage_key(t) if id(t) in self.in_python else None
            if key is not None and read(t, "_base") is None:
                found.setdefault(key, []).append(number)
        return found

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
                self._by_id[key].append((owner, steps[key]))
        inner: set[int] = set()
        for saved in graphs.saved:
            owner = owners[saved.root]
            if saved.tensor not in self.in_python:
                inner.add(saved.tensor)
            if owner is None:
                continue
            step = steps[saved.node]._replace(anchor=f"{saved.name} (saved {saved.label})")
            if saved.tensor in self._ids:
                self._by_id[saved.tensor].append((owner, step))
            if saved.tensor not in self.in_python:
                # a node keeps its own output under a second handle, to avoid a cycle; and of a view
                # that no variable has, the user knows the base
                if saved.base in self._ids:
                    self._by_id[saved.base].append((owner, step))
                if saved.key is not None:
                    self._by_storage[saved.key].append((owner, step._replace(shares=True)))
        for owner, t in enumerate(self.tensors):
            if id(t) not in inner:
                self._note_tensor(owner, t)

    def _note_tensor(self, owner: int, t: Tensor) -> None:
        base = read(t, "_base")
        if base is not None:
            step = _WHOLE_VIEW if element_bytes(t) == storage_bytes(t) else _VIEW
            self._by_id[id(base)].append((owner, step))
        gradient = gradient_of(t)
        if gradient is not None:
            self._by_id[id(gradient)].append((owner, _GRADIENT))


def _instances_by_kind() -> list[list[Any]]:
    """Return all instances of each of the kinds, then all nodes."""
    bases = ((kind,) for kind in _KINDS)
    kinds = {
        id(cls): number
        for number, some in enumerate((*bases, node_classes()))
        for cls in subclasses_of(*some)
    }
    found: list[list[Any]] = [[] for _ in range(len(_KINDS) + 1)]
    for each in of_classes(tracked_objects(), kinds):
        found[kinds[id(type(each))]].append(each)
    return found
