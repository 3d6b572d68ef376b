"""Running a function on the CPU that did not fit on its device at any size.

Invariant: what it writes into its arguments arrives in them, tensors and containers alike, and what
it returns is where the arguments were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tenure._containers import Survey, entries_of, is_mutable, set_entries
from tenure._storages import byte_range, storages_of
from tenure._torch.storages import key_of
from tenure._torch.writes import version_of, write_back

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 16
"""The largest element, complex128: views of any dtype begin at a multiple of it."""


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
        self._tensors = [*map(_Copy, originals, _copies_of(originals))]
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


# --- copies that share memory as the originals do


def _copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """A copy on the CPU of each; of tensors whose memory overlaps, views of one copied memory.

    Only the bytes from the first to the last element of those that overlap are copied: a batch is
    often a few rows of a data set, see test_only_the_memory_between_the_arguments_is_copied.

    That goes for plain strided tensors without a graph. Of all others, such as those that need
    gradients, each has a copy of its own.
    """
    copies: dict[int, Tensor] = {}
    for group in _overlapping(filter(_can_share, tensors)):
        if len(group) > 1:
            copies.update(zip(map(id, group), _copied_as_one(group), strict=True))
    return [copies[id(each)] if id(each) in copies else _copied(each) for each in tensors]


def _shows_one_memory(tensor: Tensor) -> bool:
    """Whether it is strided and has a storage: no wrapper, neither a subclass nor functorch's."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and bool(storages_of(tensor))


def _can_share(tensor: Tensor) -> bool:
    # A tensor that needs gradients has a copy that leads back to it, which a view of raw memory
    # would not. Conjugated and negated ones show other values than their memory holds.
    return (
        _shows_one_memory(tensor)
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def _overlapping(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors, by the bytes of a storage from the first to the last element of each."""
    by_storage: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_storage[key_of(tensor.untyped_storage())].append(tensor)
    for sharing in by_storage.values():
        group: list[Tensor] = []
        end = 0
        for tensor in sorted(sharing, key=byte_range):
            first, last = byte_range(tensor)
            if group and first >= end:
                yield group
                group = []
            group.append(tensor)
            end = max(end, last)
        yield group


def _copied_as_one(group: list[Tensor]) -> list[Tensor]:
    start = min(byte_range(each)[0] for each in group) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    end = max(byte_range(each)[1] for each in group)
    with torch.inference_mode(False), torch.no_grad():
        on_device = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        on_device.set_(group[0].untyped_storage(), start, (end - start,), (1,))
        memory = on_device.to(_CPU).untyped_storage()
    return [_view_of(memory, each, start) for each in group]


def _view_of(memory: torch.UntypedStorage, tensor: Tensor, start: int) -> Tensor:
    """What the tensor is in its storage, in memory that begins at another byte of it."""
    is_inference = torch.is_inference_mode_enabled() and tensor.is_inference()
    with torch.inference_mode(is_inference), torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype)
        offset = tensor.storage_offset() - start // tensor.itemsize
        return view.set_(memory, offset, tensor.shape, tensor.stride())


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that counts its versions if the tensor does, also in inference mode."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return tensor.to(_CPU)
    return tensor.to(_CPU)
