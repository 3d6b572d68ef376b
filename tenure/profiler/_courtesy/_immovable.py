"""Why memory has to stay on its device: because bytes at another address would not be the same.

Whatever is in doubt stays; a reason is a sentence about one storage or about its whole device.
"""

from __future__ import annotations

import torch

from tenure._capture import kind_of_live_graph
from tenure._torch.storages import key_of, shared_keys

from ._address_segments import Segments
from ._away import can_guard
from ._inventory import Holding


class Judge:
    """Says of each holding of a device why it can't be moved, if so.

    Args:
        device: the device, with its index.
        segments: where its memory lies.
    """

    def __init__(self, device: torch.device, segments: Segments) -> None:
        self._segments = segments
        self._shared = shared_keys()
        self._of_device = _reason_of_device(device)

    def reason(self, holding: Holding) -> str:
        """A reason to stay; empty for what can be moved."""
        return self._of_device or self._of_memory(holding) or _of_owners(holding)

    def _of_memory(self, holding: Holding) -> str:
        storage = holding.storage
        if not storage.resizable():
            return "its memory belongs to somebody else than torch"
        if key_of(storage) in self._shared:
            return "it is shared with another process"
        if self._segments.at(storage.data_ptr()).is_private:
            return "it lies in a memory pool of its own, whose addresses may be in use"
        return ""


def _of_owners(holding: Holding) -> str:
    if holding.n_unseen:
        return (
            "something in C++ that can't be seen uses it too, such as another library by DLPack, "
            "an operation that is running, or the graph of a change to a view"
        )
    blunt = [type(handle).__name__ for handle in holding.handles if not can_guard(handle)]
    if blunt:
        return f"a {blunt[0]} has slots, so its use meanwhile could not be refused"
    return ""


def _reason_of_device(device: torch.device) -> str:
    if not _can_resize(device):
        return f"torch can't empty a storage of {device}, and fill it again, in place"
    graph = kind_of_live_graph(device)
    return "" if graph is None else f"a live {graph} replays on the addresses it was captured with"


def _can_resize(device: torch.device) -> bool:
    """Whether torch resizes storages of this type of device: not of all, such as MPS."""
    trial = torch.empty(0, device=device).untyped_storage()
    try:
        trial.resize_(0)
    except RuntimeError:
        return False
    return True
