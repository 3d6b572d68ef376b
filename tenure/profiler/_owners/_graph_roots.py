"""Which tensor a graph is told by: the one that has to be dropped for the graph to go."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from tenure._heap import below, cpp_references, read, references_beside

from ._saved import SavedStorage

Graph: TypeAlias = tuple[Any, weakref.ref[Tensor] | None]
"""A node, and a tensor that leads to it where there is one."""
Roots: TypeAlias = dict[int, weakref.ref[Tensor]]


def graphs_of(tensors: list[Tensor], nodes: list[Any]) -> list[Graph]:
    """The nodes that tensors and variables lead to; those that no other leads to come first."""
    # A node can be held without its tensor (by a hook, in a variable), and a tensor's node can be
    # one that Python has no object for yet.
    found: dict[int, Graph] = {}
    lent: set[int] = set()
    for t, count in zip(tensors, references_beside(tensors), strict=True):
        node = read(t, "grad_fn")
        if node is not None and id(node) not in found:
            found[id(node)] = (node, weakref.ref(t))
            if count <= cpp_references(t):
                lent.add(id(node))
    for node in nodes:
        found.setdefault(id(node), (node, None))
    # The tensor at the top of a graph is what has to be dropped: below a loss, every result that a
    # variable still has would be named for its part. See
    # test_what_a_graph_saved_is_told_with_the_tensor_at_its_top.
    inner = below(node for node, _ in found.values())
    # What another graph has saved may have one of its own, as the copy has that an operation in
    # place makes: see the planted "gradients with graphs".
    return sorted(found.values(), key=lambda graph: (id(graph[0]) in lent, id(graph[0]) in inner))


def roots_of(saved: Mapping[int, SavedStorage], graphs: list[Graph]) -> Roots:
    """By storage, the tensor whose graph has saved it; where none leads to the graph, no entry."""
    roots = {key: graphs[entry.root][1] for key, entry in saved.items()}
    return {key: root for key, root in roots.items() if root is not None}
