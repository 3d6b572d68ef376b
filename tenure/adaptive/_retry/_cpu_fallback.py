"""Running a function on the CPU that did not fit on its device at any size.

Invariant: what it writes into its arguments arrives in them, tensors and containers alike, and what
it returns is where the arguments were.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenure._torch_pytree import parts_of
from tenure._torch_versions import version_of, write_back

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
    """What one call was given in place of its arguments: tensors, and containers of those.

    The same argument, given twice, has one copy; what needs none stands for itself.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor, int | None]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._originals: dict[int, Any] = {}
        self._device = _CPU

    def to_cpu(self, tree: Any) -> Any:
        """The same tree with its tensors on the CPU; a container of none that moved as it is."""
        if isinstance(tree, Tensor):
            return self._copy_of(tree)
        if not _is_mutable(tree):
            return _mapped(self.to_cpu, tree)
        if id(tree) not in self._containers:
            given = _mapped(self.to_cpu, tree)
            self._containers[id(tree)] = tree, given
            self._originals[id(given)] = tree
        return self._containers[id(tree)][1]

    def write_back(self) -> None:
        """Write what changed into the tensors on the device, and into the containers."""
        for original, given, version in self._tensors.values():
            if given is not original and (version is None or version_of(given) != version):
                write_back(original, given, None)
        for original, given in self._containers.values():
            self._write_back_entries(original, given)

    def to_device(self, tree: Any) -> Any:
        """The same tree with its tensors where the arguments were; arguments become themselves."""
        if id(tree) in self._originals:
            return self._originals[id(tree)]
        return tree.to(self._device) if isinstance(tree, Tensor) else _mapped(self.to_device, tree)

    def _copy_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._tensors:
            given = tensor if tensor.device == _CPU else _copied(tensor)
            self._tensors[id(tensor)] = tensor, given, version_of(given)
            self._originals[id(given)] = tensor
            if self._device == _CPU:
                self._device = tensor.device
        return self._tensors[id(tensor)][1]

    def _write_back_entries(self, original: Any, given: Any) -> None:
        """Only where something changed, so that the others keep what they are made of."""
        if isinstance(original, dict):
            for key in [key for key in original if key not in given]:
                del original[key]
            for key, value in list(given.items()):
                mapped = self.to_device(value)
                if key not in original or original[key] is not mapped:
                    original[key] = mapped
            return
        entries = [self.to_device(value) for value in given]
        if len(entries) != len(original) or any(map(_is_other, entries, original)):
            original.clear()
            original.extend(entries)


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that counts its versions if the tensor does, also in inference mode."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return tensor.to(_CPU)
    return tensor.to(_CPU)


def _is_mutable(tree: Any) -> bool:
    return isinstance(tree, dict | list | deque)


def _is_other(one: object, other: object) -> bool:
    return one is not other


def _mapped(move: Callable[[Any], Any], tree: Any) -> Any:
    """The container with each entry moved; the same object where none is another than before."""
    if isinstance(tree, dict):
        return _replaced(tree, {key: move(value) for key, value in tree.items()})
    if isinstance(tree, list | deque):
        return _replaced(tree, dict(enumerate(map(move, tree))))
    if isinstance(tree, tuple):
        entries = [move(entry) for entry in tree]
        if not any(map(_is_other, entries, tree)):
            return tree
        return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
    parts = parts_of(tree)
    if parts is None:
        return tree
    children, made_of = parts
    others = [move(child) for child in children]
    return made_of(others) if any(map(_is_other, others, children)) else tree


def _replaced(tree: Any, entries: dict[Any, Any]) -> Any:
    """A copy, of whatever class, with other entries; the same object where none differs."""
    others = {key: entry for key, entry in entries.items() if entry is not tree[key]}
    if not others:
        return tree
    made = copy.copy(tree)
    for key, entry in others.items():
        made[key] = entry
    return made
