"""What goes into a call and comes out of it: arguments on the device, results in no page's memory.

Invariant: containers keep their class and what is set on them, and one that leads to nothing moved
is passed itself. What a forward puts into a container arrives in the caller's own. What it returns
of its weights is copied, for their memory is where other weights pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tenure._containers import Survey, contents_of, entries_of, is_mutable, set_entries, tensors_in
from tenure._errors import TenureError
from tenure._storages import all_storages_of
from tenure._text import describe_tensor, listed
from tenure._torch.storages import key_of

_PLAIN = frozenset({bool, int, float, str, type(None)})
_N_NAMED = 3


class Arguments:
    """What a call is given, with its tensors on a device.

    Args:
        tree: tensors in lists, tuples, dictionaries and dataclasses, and subclasses of these. Other
            objects stay as they are: a cache is the caller's, and moves with what it is given.
        source: the type of device to take them from.
        device: where to.

    Attributes:
        given: the tree with its tensors moved.
    """

    def __init__(self, tree: Any, source: str, device: torch.device) -> None:
        survey = Survey(tree, is_leaf=is_leaf)
        nodes: dict[int, Any] = survey.nodes
        moved = {
            key: node.to(device) for key, node in nodes.items() if _device_type_of(node) == source
        }
        self.given = survey.replaced(moved) if moved else tree
        self._device = device
        self._containers = [
            (node, moved[key]) for key, node in nodes.items() if key in moved and is_mutable(node)
        ]
        if self._containers:
            # What the ids belong to.
            self._kept = survey, moved
            self._back = {id(other): nodes[key] for key, other in moved.items()}

    def hand_back(self) -> None:
        """Put into the caller's containers what was put into those that stood for them."""
        # All of them before the first is replaced, which adds the id of its entries to `_back`: a
        # dictionary of entries that had died would lend its id, and what it held, to a later one.
        surveys = [Survey(entries_of(given), self._back, is_leaf) for _, given in self._containers]
        for (original, _), survey in zip(self._containers, surveys, strict=True):
            set_entries(original, survey.replaced(self._back))

    def explain(
        self,
        error: RuntimeError,
        function: Callable[..., Any],
        strangers: Iterator[tuple[str, Tensor]],
    ) -> None:
        """Add to an error about devices what is elsewhere than on the device.

        Args:
            error: it.
            function: what was called with these arguments.
            strangers: the tensors that its model has got since it was paged, by name.
        """
        if not is_about_devices(error):
            return
        args, kwargs = self.given
        try:
            roots = inspect.signature(function).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            # Some functions of C have no signature.
            roots = {"args": args, **kwargs}
        found = [
            f"{name} ({describe_tensor(tensor)})"
            for name, tensor in islice(_misplaced(roots, self._device), _N_NAMED)
        ]
        if found:
            error.add_note(
                f"The model is paged to {self._device}, and tensors in its arguments are "
                f"elsewhere: {', '.join(found)}. Tensors on the host are moved in lists, tuples, "
                "dictionaries and dataclasses; other objects are left as they are. Move these to "
                f"{str(self._device)!r} before the call."
            )
        found = [
            f"{name!r} ({describe_tensor(tensor)})"
            for name, tensor in strangers
            if tensor.device != self._device
        ]
        if found:
            error.add_note(
                f"The model is paged to {self._device}, and it has got {listed(found, _N_NAMED)} "
                "since then, as a new adapter brings: those are not paged, and stay where they "
                "are. Call unpage(), and page the model again with them."
            )


def apart_from(lent: Collection[int], output: Any) -> Any:
    """Return an output with copies in place of tensors that lie in memory of pages.

    Args:
        lent: the ids of the storages of pages, as of ``key_of``.
        output: tensors in lists, tuples, dictionaries and dataclasses. What is in other objects is
            no less safe: its page is not reused as long as it is held.
    """
    survey = Survey(output, is_leaf=is_leaf)
    copies = {
        key: _copy(node)
        for key, node in survey.nodes.items()
        if isinstance(node, Tensor) and _is_in(lent, node)
    }
    return survey.replaced(copies) if copies else output


def is_leaf(node: object) -> bool:
    """Return whether a container is an object like any other, which is left alone."""
    # A PackedSequence has a part that stays on the host; what is registered with torch's pytree
    # may be a cache that a forward writes to, which a copy would keep from its owner.
    if type(node) in _PLAIN or isinstance(node, Tensor | PackedSequence):
        return True
    return not (isinstance(node, tuple) or is_mutable(node))


def _device_type_of(node: object) -> str | None:
    tensor = node.data if isinstance(node, PackedSequence) else node
    return tensor.device.type if isinstance(tensor, Tensor) else None


def is_about_devices(error: BaseException | None) -> TypeGuard[RuntimeError]:
    """Return whether torch was given tensors on several devices."""
    is_other = isinstance(error, TenureError | torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and not is_other and "device" in str(error)


def _misplaced(roots: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Tensors elsewhere than on a device, with the argument that leads to each."""
    for name, root in roots.items():
        for tensor in tensors_in([root], _below):
            # Numbers may be anywhere.
            if tensor.device != device and tensor.dim():
                yield name, tensor


def _below(node: Any) -> list[Any]:
    """Return what an argument leads to, also inside of objects that are left alone."""
    if isinstance(node, nn.Module | type | Tensor):
        return []
    if isinstance(node, PackedSequence):
        return [node.data]
    return contents_of(node) or list(getattr(node, "__dict__", {}).values())


def _is_in(lent: Collection[int], tensor: Tensor) -> bool:
    return any(key_of(storage) in lent for storage in all_storages_of(tensor))


def _copy(tensor: Tensor) -> Tensor:
    # Not aside: it is the model's result, which the scopes and modes of the caller are to see. A
    # weight of a model that is trained leads to its parameter, and so does the copy.
    with torch.set_grad_enabled(tensor.grad_fn is not None):
        return tensor.clone()
