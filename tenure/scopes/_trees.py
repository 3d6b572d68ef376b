"""Finding the tensors in what a user passes: containers of any shape, each tensor once.

The walk is by identity and without recursion, so cycles and deep nesting are harmless, and it
compares no user object with another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from tenure import _containers
from tenure._errors import MissingTorchNameError, ScopeUsageError
from tenure._storages import inner_tensors

Tree = TypeVar("Tree")
"""What the functions of ``*trees`` take and give back."""
_PLAIN = frozenset(map(id, (list, tuple, dict, set)))


def tensors_in(trees: Iterable[object]) -> list[Tensor]:
    """Return the tensors of ``trees`` in order, each once, with inner ones of wrappers.

    Raises:
        ScopeUsageError: the code of a container, such as the flatten function of a pytree, raised.
    """
    return _containers.tensors_in(trees, _below)


def required_tensors(trees: tuple[object, ...], call: str) -> list[Tensor]:
    """Do as ``tensors_in``, but raise an error if a tree holds things and none is a tensor.

    Raises:
        ScopeUsageError: no tree was passed, or one of them holds things and no tensor.
    """
    if not trees:
        raise ScopeUsageError(f"{call} was called without an argument. Pass the tensors it is for.")
    found: dict[int, Tensor] = {}
    for tree in trees:
        # attempts hand on a plain list; by identity, because a metaclass may have no hash
        is_plain = type(tree) is list and set(map(id, map(type, tree))) == {id(Tensor)}
        inside: Any = tree if is_plain else tensors_in((tree,))
        if not (inside or _is_empty(tree)):
            raise ScopeUsageError(
                f"{call} got {_brief(tree)}, which holds no tensor, and changed nothing. "
                "Pass a tensor, or a list, tuple, dict, dataclass or pytree of tensors."
            )
        for tensor in inside:
            found[id(tensor)] = tensor
    return list(found.values())


def given_back(trees: tuple[Tree, ...]) -> Tree:
    """Return the one tree of ``*trees``, or the tuple of several."""
    several: Any = trees
    return trees[0] if len(trees) == 1 else several


def _below(node: Any) -> list[Any]:
    try:
        if isinstance(node, Tensor):
            return inner_tensors(node)
        if isinstance(node, nn.Module):
            return [*node.parameters(), *node.buffers()]
        contents = _containers.contents_of(node)
        # a cache of keys and values is no registered pytree: what a scoped step returns holds one
        if not contents and type(node).__module__.startswith("transformers."):
            return list(getattr(node, "__dict__", {}).values())
        return contents
    except MissingTorchNameError:
        raise
    except Exception as error:
        raise ScopeUsageError(
            f"A {type(node).__name__} could not be searched for tensors: its own code raised "
            f"{type(error).__name__}. Nothing was changed. Pass the tensors in it instead."
        ) from error


def _is_empty(tree: object, depth: int = 8) -> bool:
    """Return whether a tree is None or empty containers, as of a detector that found nothing."""
    if tree is None:
        return True
    if id(type(tree)) not in _PLAIN or not depth:
        return False
    contents: Any = tree.values() if type(tree) is dict else tree
    return all(_is_empty(each, depth - 1) for each in contents)


def _brief(tree: object) -> str:
    kind = type(tree)
    is_single = id(kind) in _containers.SINGLE
    return f"{kind.__name__} {repr(tree)[:40]}" if is_single else f"a {kind.__name__}"
