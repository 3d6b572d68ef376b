"""Results on their way from a device to the host, which are copied while the next piece computes.

Invariant: nobody reads what is on its way before the event that follows its copies, and no more
than one result is in pinned memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tenure._containers import mapped
from tenure._errors import AdaptiveUsageError
from tenure._graph_capture import is_capturing
from tenure._text import describe_tensor
from tenure.scopes import persist


class Landing:
    """A result of one piece, on its way to the host.

    Args:
        result: tuples, lists and dicts of tensors; nothing of it is kept but tensors on the host.

    Attributes:
        copies: the tensors that are brought.
        on_host: the tensors that were there already.

    Raises:
        AdaptiveUsageError: a tensor requires grad, or a graph is being captured.
    """

    __slots__ = ("_begun", "_events", "copies", "on_host")

    def __init__(self, result: Any) -> None:
        self.copies: list[Tensor] = []
        self.on_host: list[Tensor] = []
        devices: set[torch.device] = set()

        def begin(tensor: Tensor) -> Tensor:
            _check(tensor)
            if tensor.device.type == "cpu":
                self.on_host.append(tensor)
                return tensor
            copy = _copied(tensor)
            self.copies.append(copy)
            devices.add(tensor.device)
            return copy

        self._begun = mapped(begin, result)
        self._events = [_mark(device) for device in devices if _has_streams(device)]

    def landed(self) -> Any:
        """Return the result in memory of the host, which is not pinned; waits until it is there."""
        for event in self._events:
            event.synchronize()
        copies = {id(copy) for copy in self.copies}
        # Called by the next attempt, whose failure must not dispose of this.
        with persist():
            return mapped(lambda each: each.clone() if id(each) in copies else each, self._begun)


def _check(tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise AdaptiveUsageError(
            f'collect="host" got {describe_tensor(tensor)}, which requires grad: its graph would '
            "keep the memory of the device. Make the call under torch.no_grad(), or return what "
            'was detached; collect="cat" keeps graphs.'
        )
    if is_capturing(tensor.device):
        raise AdaptiveUsageError(
            'collect="host" waits for copies to the host, which would break the graph that is '
            'being captured. Use collect="cat" there.'
        )


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the host, pinned if it can be: only then does the host not wait for it."""
    if not _has_streams(tensor.device):
        return tensor.cpu()
    try:
        copy = tensor.to("cpu", non_blocking=True)
    # no pinned memory is left, which is no reason for a smaller piece
    except RuntimeError:
        return tensor.cpu()
    # It may have been made on another stream, which must not use its memory again before that.
    module: Any = torch.get_device_module(tensor.device)
    tensor.record_stream(module.current_stream(tensor.device))
    return copy


def _has_streams(device: torch.device) -> bool:
    module: Any = torch.get_device_module(device)
    return hasattr(module, "current_stream") and hasattr(module, "Event")


def _mark(device: torch.device) -> Any:
    """Return an event after all that the device was given so far."""
    module: Any = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event
