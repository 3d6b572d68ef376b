"""Running a function on the CPU that did not fit on its device at any size.

Invariant: what it writes into its arguments arrives in them, and what it returns is where the
arguments were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def on_cpu(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the tensors of its arguments on the CPU.

    Modules stay where they are: moving the weights of a user's model is not for a retry to do.
    """
    moved = _Moved()
    result = function(*moved.to_cpu(args), **moved.to_cpu(kwargs))
    moved.write_back()
    return moved.to_device(result)


class _Moved:
    """The tensors of one call that were moved, and their copies."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}

    def to_cpu(self, tree: Any) -> Any:
        """The same tree with its tensors on the CPU; the same tensor gives the same copy."""
        return _mapped(self._copy_of, tree)

    def write_back(self) -> None:
        """Write what changed in place into the tensors on the device."""
        for original, copy, version in self._copies.values():
            if copy._version != version:
                with torch.no_grad():
                    original.copy_(copy)

    def to_device(self, tree: Any) -> Any:
        """The same tree with its tensors where the arguments were; arguments become themselves."""
        originals = {id(copy): original for original, copy, _ in self._copies.values()}
        device = next((original.device for original in originals.values()), _CPU)
        return _mapped(lambda t: originals[id(t)] if id(t) in originals else t.to(device), tree)

    def _copy_of(self, tensor: Tensor) -> Tensor:
        if tensor.device == _CPU:
            return tensor
        if id(tensor) not in self._copies:
            copy = tensor.to(_CPU)
            self._copies[id(tensor)] = tensor, copy, copy._version
        return self._copies[id(tensor)][1]


def _mapped(move: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with each tensor moved; only tuples, lists and dicts are looked into."""
    if isinstance(tree, Tensor):
        return move(tree)
    if type(tree) is dict:
        return {key: _mapped(move, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(move, value) for value in tree))
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(move, value) for value in tree)
    return tree
