"""References between tensors that only C++ knows: views, gradients and what autograd saved."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from tenure._storages import storage_key

from ._index import Referrers
from ._nodes import below, saved_tensors, walk_nodes
from ._static import type_name
from ._tensors import cpp_references, gradient_of, live_tensors, read, spans_storage
from ._words import Step

_VIEW = Step("", "view", anchor="view", link=" ")
_WHOLE_VIEW = _VIEW._replace(whole=True)
_GRADIENT = Step(".grad", "attribute")
# references to a handle from our list and from `map` while it counts them
_OWN_REFERENCES = 2


class Reference(NamedTuple):
    """One reference, by the number of the live tensor whose life it shares."""

    owner: int
    step: Step


class TensorGraph:
    """Who holds which tensor in C++, for all tensors that are alive now.

    Args:
        referrers: it may hold one reference to a tensor itself.
        live: all tensors with a handle in Python, if they are known already.

    Attributes:
        live: the tensors, held strongly while this object lives.
    """

    def __init__(self, referrers: Referrers, live: list[torch.Tensor] | None = None) -> None:
        self.live = live_tensors() if live is None else live
        counts = list(map(sys.getrefcount, self.live))
        self._live_ids = frozenset(map(id, self.live))
        # an earlier search may have given a handle to what only autograd has
        self._handed_out = frozenset(
            id(t)
            for t, count in zip(self.live, counts, strict=True)
            if count - _OWN_REFERENCES - (t in referrers) > cpp_references(t)
        )
        self._shared: defaultdict[int, list[int]] | None = None
        self._inner: set[int] = set()
        self._by_id: defaultdict[int, list[Reference]] = defaultdict(list)
        self._by_storage: defaultdict[int, list[Reference]] = defaultdict(list)
        self._add_nodes()
        for owner, t in enumerate(self.live):
            if id(t) not in self._inner:
                self._add_tensor(owner, t)

    def __contains__(self, candidate: object) -> bool:
        return id(candidate) in self._live_ids

    def owners_of(self, held: object) -> Iterator[tuple[object, Step]]:
        """Tensors that hold this tensor or graph node itself, and how."""
        return self._others(held, self._by_id.get(id(held), ()))

    def sharers_of(self, t: torch.Tensor) -> Iterator[tuple[object, Step]]:
        """Tensors whose graph saved the memory of this one under another handle."""
        key = storage_key(t)
        return self._others(t, self._by_storage.get(key, ()) if key is not None else ())

    def handles_over(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The other handles to the memory of a tensor that are no views, its base aside."""
        if self._shared is None:
            self._shared = defaultdict(list)
            for owner, other in enumerate(self.live):
                key = storage_key(other) if id(other) in self._handed_out else None
                if key is not None and read(other, "_base") is None:
                    self._shared[key].append(owner)
        key, base = storage_key(t), read(t, "_base")
        found = (self.live[owner] for owner in self._shared.get(key, ())) if key is not None else ()
        return [other for other in found if other is not t and other is not base]

    def _others(
        self, held: object, references: Iterable[Reference]
    ) -> Iterator[tuple[object, Step]]:
        for owner, step in references:
            if self.live[owner] is not held:
                yield self.live[owner], step

    def _add_tensor(self, owner: int, t: torch.Tensor) -> None:
        base = read(t, "_base")
        if base is not None:
            step = _WHOLE_VIEW if spans_storage(t) else _VIEW
            self._by_id[id(base)].append(Reference(owner, step))
        gradient = gradient_of(t)
        if gradient is not None:
            self._by_id[id(gradient)].append(Reference(owner, _GRADIENT))

    def _add_nodes(self) -> None:
        nodes = [read(t, "grad_fn") for t in self.live]
        inner_ids = below(node for node in nodes if node is not None)
        seen: dict[int, Any] = {}
        # outputs first: a node belongs to the graph of what was computed last
        for inner in (False, True):
            for owner, node in enumerate(nodes):
                if node is not None and (id(node) in inner_ids) is inner:
                    self._add_graph(owner, node, seen)

    def _add_graph(self, owner: int, root: Any, seen: dict[int, Any]) -> None:
        for node in walk_nodes([root], seen):
            name = type_name(type(node))
            step = Step("", "autograd", anchor=name, link=" in the graph of ")
            self._by_id[id(node)].append(Reference(owner, step))
            for label, t in saved_tensors(node):
                anchor = f"{name} (saved {label})"
                self._add_saved(owner, t, step._replace(anchor=anchor))

    def _add_saved(self, owner: int, t: torch.Tensor, step: Step) -> None:
        if id(t) in self._live_ids:
            self._by_id[id(t)].append(Reference(owner, step))
        if id(t) not in self._handed_out:
            # a node keeps its own output under a second handle, to avoid a cycle; and of a view
            # that no variable has, the user knows the base
            self._inner.add(id(t))
            base, key = read(t, "_base"), storage_key(t)
            if base is not None:
                self._by_id[id(base)].append(Reference(owner, step))
            if key is not None:
                self._by_storage[key].append(Reference(owner, step._replace(shares=True)))
