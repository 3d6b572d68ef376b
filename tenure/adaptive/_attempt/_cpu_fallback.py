"""Running a function on the CPU that did not fit on its device at any size.

Invariant: what it writes into its arguments arrives in them, tensors and containers alike, and what
it returns is where the arguments were.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tenure._containers import Survey, entries_of, is_mutable, set_entries
from tenure._errors import AdaptiveUsageError
from tenure._storages import byte_range, storages_of
from tenure._text import describe_tensor
from tenure._torch.storages import key_of
from tenure._torch.writes import version_of, write_back

from .._undo import differing

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

    The same argument, given twice, has one copy; what needs none stands for itself.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        survey = Survey((args, kwargs))
        nodes = survey.nodes.values()
        originals = [node for node in nodes if isinstance(node, Tensor) and node.device != _CPU]
        self._device = originals[0].device if originals else _CPU
        self._tensors = [_Copy(each, _copied(each)) for each in originals]
        given = {id(each.original): each.given for each in self._tensors}
        self.args, self.kwargs = survey.replaced(given)
        # Containers without tensors of the device are given as they are, and written into all the
        # same: results are often appended to a list of the caller's.
        self._containers = [(node, given.get(id(node), node)) for node in nodes if is_mutable(node)]
        self._back = {id(given.get(key, node)): node for key, node in survey.nodes.items()}
        # what the ids belong to: an object that is gone would leave its id to another
        self._kept: list[Any] = [given, survey]

    def write_back(self) -> None:
        """Write what changed into the tensors on the device, and into the containers."""
        _refuse_shared_writes(self._tensors)
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
        if _shows_one_memory(given):
            with torch.inference_mode(given.is_inference()):
                # an alias of the same memory: resize_ and .data make another of the one that is
                # given, see test_an_argument_that_became_another_inside_is_that_on_the_device
                self._memory = given.detach()
        self._version = version_of(given)

    def has_other_values(self) -> bool:
        """Tell whether it was written, or became another."""
        if _shown_by(self.given) != _shown_by(self._memory):
            return True
        # tensors of inference count no versions
        if self._version is None:
            return differing([(self._memory, self.original.cpu())])[0]
        return version_of(self._memory) != self._version

    def write_back(self) -> None:
        """Write what changed; what was resized or given other data inside becomes that here.

        It then has memory of its own: other tensors that shared the old one keep that.
        """
        # Only what was written goes back: a graph that saved the original refuses its backward pass
        # if that has another version. See
        # test_what_is_only_read_keeps_its_version_for_the_graphs_that_saved_it.
        if self._version is None or version_of(self._memory) != self._version:
            write_back(self.original, self._memory, None)
        if _shown_by(self.given) != _shown_by(self._memory):
            with torch.inference_mode(self.original.is_inference()), torch.no_grad():
                self.original.data = self.given.detach().to(self.original.device)


def _shown_by(tensor: Tensor) -> tuple[object, ...] | None:
    """Which elements of which memory a tensor shows; None where that is not one memory."""
    if not _shows_one_memory(tensor):
        return None
    storage, offset = key_of(tensor.untyped_storage()), tensor.storage_offset()
    return storage, offset, tensor.dtype, tensor.shape, tensor.stride()


def _refuse_shared_writes(copies: list[_Copy]) -> None:
    """Make sure that no tensor was written whose memory another argument shows, in a copy.

    Raises:
        AdaptiveUsageError: one was.
    """
    by_storage: defaultdict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        if _shows_one_memory(copy.original):
            by_storage[key_of(copy.original.untyped_storage())].append(copy)
    for sharing in by_storage.values():
        for one, other in itertools.permutations(sharing, 2):
            (first, end), (other_first, other_end) = map(byte_range, (one.original, other.original))
            if max(first, other_first) < min(end, other_end) and one.has_other_values():
                raise AdaptiveUsageError(
                    f"cpu_fallback= ran a function on the CPU that writes into an argument, "
                    f"{describe_tensor(one.original)}, whose memory another argument shares; there "
                    "each has a copy of its own. Nothing on the device was changed. Pass one of "
                    "the two, and make the other inside the function."
                )


def _shows_one_memory(tensor: Tensor) -> bool:
    """Whether it is strided and has a storage: no wrapper, neither a subclass nor functorch's."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and bool(storages_of(tensor))


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that counts its versions if the tensor does, also in inference mode."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return tensor.to(_CPU)
    return tensor.to(_CPU)
