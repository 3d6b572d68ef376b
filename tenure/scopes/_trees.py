"""Finding the tensors in what a user passes: containers of any shape, each tensor once.

The walk is by identity and without recursion, so cycles and deep nesting are harmless, and it
compares no user object with another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from tenure._containers import contents_of
from tenure._errors import ScopeUsageError
from tenure._storages import inner_tensors

Tree = TypeVar("Tree")
"""What the functions of ``*trees`` take and give back."""
_SINGLE = frozenset({int, float, complex, bool, str, bytes, type(None)})


def tensors_in(trees: Iterable[object]) -> list[Tensor]:
    """The tensors of ``trees`` in order, each once; a wrapper subclass brings its inner ones.

    Raises:
        ScopeUsageError: the code of a container, such as the flatten function of a pytree, raised.
    """
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting = list(trees)[::-1]
    keep: list[object] = []  # what was flattened on the way must not die, or its id could recur
    while waiting:
        node = waiting.pop()
        try:
            if type(node) in _SINGLE or id(node) in seen:
                continue
            seen.add(id(node))
            keep.append(node)
            if isinstance(node, Tensor):
                found.append(node)
                waiting.extend(inner_tensors(node)[::-1])
            else:
                waiting.extend(_below(node)[::-1])
        except Exception as error:
            raise ScopeUsageError(
                f"A {type(node).__name__} could not be searched for tensors: its own code raised "
                f"{type(error).__name__}. Nothing was changed. Pass the tensors in it instead."
            ) from error
    return found


def required_tensors(trees: tuple[object, ...], call: str) -> list[Tensor]:
    """As ``tensors_in``, but every tree must hold a tensor.

    Raises:
        ScopeUsageError: no tree was passed, or one of them holds no tensor.
    """
    if not trees:
        raise ScopeUsageError(f"{call} was called without an argument. Pass the tensors it is for.")
    found: dict[int, Tensor] = {}
    for tree in trees:
        inside = tensors_in((tree,))
        if not inside:
            raise ScopeUsageError(
                f"{call} got {_brief(tree)}, which holds no tensor, and changed nothing. "
                "Pass a tensor, or a list, tuple, dict, dataclass or pytree of tensors."
            )
        found.update((id(tensor), tensor) for tensor in inside)
    return list(found.values())


def given_back(trees: tuple[Tree, ...]) -> Tree:
    """What a function of ``*trees`` returns: its one argument, or the tuple of several."""
    several: Any = trees
    return trees[0] if len(trees) == 1 else several


def _below(node: Any) -> list[Any]:
    if isinstance(node, nn.Module):
        return [*node.parameters(), *node.buffers()]
    return contents_of(node)


def _brief(tree: object) -> str:
    if tree is None:
        return "None"
    plain = type(tree) in _SINGLE or (type(tree) in {list, tuple, dict, set} and not tree)
    return f"{type(tree).__name__} {repr(tree)[:40]}" if plain else f"a {type(tree).__name__}"
