"""The nodes of a graph of autograd, and what each has saved.

Nodes are read through ``_raw_saved_*`` and never through ``_saved_*``, so no unpack hook runs and
no checkpoint is recomputed.

Source: ``torch/csrc/autograd/saved_variable.h`` for what a saved tensor holds.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from tenure._torch.autograd import content_of_saved, is_saved_tensor

from ._reading import class_attributes, mro_of

_RAW = "_raw_saved_"
_VARIABLE = "variable"
_MAX_DEPTH = 2


class Slot(NamedTuple):
    """One thing that a node saved.

    Attributes:
        label: the name that the node has for it.
        data: a tensor, or what a pack hook made of one; None once backward() has freed it.
        unpack_hook: what would unpack it; None where no hook was active.
    """

    label: str
    data: Any
    unpack_hook: Any = None


def is_node(found: object) -> bool:
    """Whether an object is a node of a graph."""
    return is_node_class(type(found))


def is_node_class(cls: type) -> bool:
    """Whether the instances of a class are nodes of a graph."""
    return any("next_functions" in class_attributes(base) for base in mro_of(cls))


def walk_nodes(stack: list[Any], seen: dict[int, Any]) -> Iterator[Any]:
    """Every node once; `seen` keeps them, so that their identities stay their own."""
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            yield node
            stack.extend(reversed(inner_nodes(node)))


def below(roots: Iterable[Any]) -> frozenset[int]:
    """The identities of the nodes that another node leads to."""
    seen: dict[int, Any] = {}
    return frozenset(
        id(inner) for node in walk_nodes(list(roots), seen) for inner in inner_nodes(node)
    )


def inner_nodes(node: Any) -> list[Any]:
    """The nodes that a backward pass runs next."""
    return [inner for inner, _ in node.next_functions if inner is not None]


def slot_names(cls: type) -> list[str]:
    """The attributes under which a class of nodes shows what it has saved."""
    names = (name for base in mro_of(cls) for name in class_attributes(base))
    return [name for name in names if name.startswith(_RAW) or name == _VARIABLE]


def slots_of_node(node: Any, names: list[str] | None = None) -> Iterator[Slot]:
    """What a node has saved, a list of tensors item by item.

    Args:
        node: the node.
        names: the slot names of its class, if they are known.
    """
    for name in slot_names(type(node)) if names is None else names:
        try:
            saved = getattr(node, name)
        # freed by backward()
        except RuntimeError:
            continue
        yield from _slots_in(name.removeprefix(_RAW), saved, _MAX_DEPTH)


def _slots_in(label: str, saved: Any, depth: int) -> Iterator[Slot]:
    if is_saved_tensor(saved):
        yield Slot(label, *content_of_saved(saved))
    elif type(saved) in (tuple, list) and depth:
        for item in saved:
            yield from _slots_in(label, item, depth - 1)
    else:
        yield Slot(label, saved)


def tensors_in(saved: Any, depth: int = _MAX_DEPTH) -> Iterator[torch.Tensor]:
    """The tensors that a slot has, those that a hook packed in plain containers among them."""
    if type(saved) in (tuple, list) and depth:
        for item in saved:
            yield from tensors_in(item, depth - 1)
    elif torch.Tensor in mro_of(type(saved)):
        yield saved
