"""References between tensors that only C++ knows: views, gradients and what autograd saved.

Nodes are read through ``_raw_saved_*`` and never through ``_saved_*``, so no unpack hook runs and
no checkpoint is recomputed.

Source: ``torch/csrc/autograd/saved_variable.h`` for what a saved tensor holds.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ._static import class_attributes, mro_of, type_name
from ._steps import Step
from ._tensors import (
    cpp_references,
    live_tensors,
    read,
    spans_storage,
    storage_key,
)

_RAW = "_raw_saved_"
_VIEW = Step("", "view", anchor="view", link=" ")
_WHOLE_VIEW = _VIEW._replace(whole=True)
_GRADIENT = Step(".grad", "attribute")
_MAX_DEPTH = 2
# references to a handle from our list and from `map` while it counts them
_OWN_REFERENCES = 2
# the stubs of torch do not know the module
_BINDINGS: Any = torch._C
_SAVED_TENSOR = _BINDINGS._autograd.SavedTensor


class Reference(NamedTuple):
    """One reference, by the number of the live tensor whose life it shares."""

    owner: int
    step: Step


class TensorGraph:
    """Who holds which tensor in C++, for all tensors that are alive now.

    Attributes:
        live: the tensors, held strongly while this object lives.
    """

    def __init__(self) -> None:
        self.live = live_tensors()
        counts = list(map(sys.getrefcount, self.live))
        self._live_ids = frozenset(map(id, self.live))
        # an earlier search may have given a handle to what only autograd has
        self._handed_out = frozenset(
            id(t)
            for t, count in zip(self.live, counts, strict=True)
            if count - _OWN_REFERENCES > cpp_references(t)
        )
        self._shared: defaultdict[int, set[int]] | None = None
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

    def may_be_an_array(self, t: torch.Tensor) -> bool:
        """Whether the memory has another handle that is no view, like the one an array keeps."""
        if self._shared is None:
            self._shared = defaultdict(set)
            for other in self.live:
                key = storage_key(other) if id(other) in self._handed_out else None
                if key is not None and read(other, "_base") is None:
                    self._shared[key].add(id(other))
        key = storage_key(t)
        return key is not None and bool(self._shared[key] - {id(t)})

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
        # reading .grad of other tensors warns
        gradient = read(t, "grad") if read(t, "is_leaf") or read(t, "retains_grad") else None
        if gradient is not None:
            self._by_id[id(gradient)].append(Reference(owner, _GRADIENT))

    def _add_nodes(self) -> None:
        nodes = [read(t, "grad_fn") for t in self.live]
        below = _below(node for node in nodes if node is not None)
        seen: dict[int, Any] = {}
        # outputs first: a node belongs to the graph of what was computed last
        for inner in (False, True):
            for owner, node in enumerate(nodes):
                if node is not None and (id(node) in below) is inner:
                    self._add_graph(owner, node, seen)

    def _add_graph(self, owner: int, root: Any, seen: dict[int, Any]) -> None:
        for node in _walk([root], seen):
            name = type_name(type(node))
            step = Step("", "autograd", anchor=name, link=" in the graph of ")
            self._by_id[id(node)].append(Reference(owner, step))
            for label, t in _saved_tensors(node):
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


def _below(roots: Iterable[Any]) -> frozenset[int]:
    seen: dict[int, Any] = {}
    return frozenset(id(inner) for node in _walk(list(roots), seen) for inner in _inner(node))


def _walk(stack: list[Any], seen: dict[int, Any]) -> Iterator[Any]:
    """Every node once; `seen` keeps them, so that their identities stay their own."""
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            yield node
            stack.extend(reversed(_inner(node)))


def _inner(node: Any) -> list[Any]:
    return [inner for inner, _ in node.next_functions if inner is not None]


def _saved_tensors(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for cls in mro_of(type(node)):
        for name in class_attributes(cls):
            if name.startswith(_RAW) or name == "variable":
                try:
                    saved = getattr(node, name)
                except RuntimeError:  # freed by backward()
                    continue
                label = name.removeprefix(_RAW)
                yield from ((label, t) for t in _tensors_in(saved, _MAX_DEPTH))


def _tensors_in(saved: Any, depth: int) -> Iterator[torch.Tensor]:
    if type(saved) is _SAVED_TENSOR:
        saved = saved.data
    if type(saved) in (tuple, list) and depth:
        for item in saved:
            yield from _tensors_in(item, depth - 1)
    elif torch.Tensor in mro_of(type(saved)):
        yield saved
