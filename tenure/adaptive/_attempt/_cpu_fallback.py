"""Running a function on the CPU that did not fit on its device at any size.

Invariant: what it writes into its arguments arrives in them, tensors and containers alike, and what
it returns is where the arguments were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tenure._containers import Survey, entries_of, is_mutable, set_entries
from tenure._torch.storages import key_of
from tenure._torch.writes import version_of, write_back

from ._cpu_copies import cpu_copies_of, shows_one_memory

_CPU = torch.device("cpu")


def on_cpu(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with the tensors of its arguments on the CPU.

    Modules stay where they are: moving the weights of a user's model is not for a retry to do.
    """
    moved = _Moved(args, kwargs)
    result = function(*moved.args, **moved.kwargs)
    moved.write_back()
    return moved.to_device(result)


class _Moved:
    """What one call was given in place of its arguments: tensors, and containers of those.

    The same argument, given twice, has one copy, and tensors that share memory have copies that
    do; what needs none stands for itself.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        survey = Survey((args, kwargs))
        nodes = survey.nodes.values()
        originals = [node for node in nodes if isinstance(node, Tensor) and node.device != _CPU]
        self._device = originals[0].device if originals else _CPU
        self._tensors = [*map(_Copy, originals, cpu_copies_of(originals))]
        given = {id(each.original): each.given for each in self._tensors}
        self.args, self.kwargs = survey.replaced(given)
        self._containers = [(node, given.get(id(node), node)) for node in nodes if is_mutable(node)]
        self._back = {id(given.get(key, node)): node for key, node in survey.nodes.items()}
        self._kept: list[Any] = [given, survey]  # what the ids belong to

    def write_back(self) -> None:
        """Write what changed into the tensors on the device, and into the containers."""
        for copy in self._tensors:
            copy.write_back()
        for original, given in self._containers:
            set_entries(original, self.to_device(entries_of(given)))

    def to_device(self, tree: Any) -> Any:
        """The same tree with its tensors where the arguments were; arguments become themselves."""
        survey = Survey(tree, self._back)
        self._kept.append(survey)
        for key, node in survey.nodes.items():
            if isinstance(node, Tensor) and key not in self._back and node.device != self._device:
                self._back[key] = node.to(self._device)
        return survey.replaced(self._back)


class _Copy:
    """A tensor on the device, and the one on the CPU that stands for it."""

    __slots__ = ("_memory", "_version", "given", "original")

    def __init__(self, original: Tensor, given: Tensor) -> None:
        self.original = original
        self.given = given
        self._memory = given
        if shows_one_memory(given):
            with torch.inference_mode(given.is_inference()):
                self._memory = given.detach()  # stays what it is if given becomes another
        self._version = version_of(given)

    def write_back(self) -> None:
        """Write what changed; what was resized or given other data inside becomes that here.

        It then has memory of its own: other tensors that shared the old one keep that.
        """
        if self._version is None or version_of(self._memory) != self._version:
            write_back(self.original, self._memory, None)
        if _shown_by(self.given) != _shown_by(self._memory):
            with torch.inference_mode(self.original.is_inference()), torch.no_grad():
                self.original.data = self.given.detach().to(self.original.device)


def _shown_by(tensor: Tensor) -> tuple[object, ...] | None:
    """Which elements of which memory a tensor shows; None where that is not one memory."""
    if not shows_one_memory(tensor):
        return None
    storage, offset = key_of(tensor.untyped_storage()), tensor.storage_offset()
    return storage, offset, tensor.dtype, tensor.shape, tensor.stride()
