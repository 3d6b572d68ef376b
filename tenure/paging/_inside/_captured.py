"""What must not happen to a paged model while a graph is captured.

Invariant: no wait, no event and no address of a paged model gets into a capture. What asks for one
is refused by name before anything is done; memory of a model that is garbage waits for the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from tenure._capture import is_capturing
from tenure._errors import PagingError

_later: list[Callable[[], None]] = []


def captures(device: torch.device) -> bool:
    """Whether a graph is being captured on this thread, on the current device or on this one."""
    if is_capturing(device):
        return True
    if device.type == "cpu":
        return False
    module = torch.get_device_module(device)
    if module.current_device() == device.index:
        return False
    with module.device(device):
        return is_capturing(device)


def check_capture(device: torch.device, what: str) -> None:
    """Refuse what must not happen while a graph is captured.

    Args:
        device: where the model is paged to.
        what: what was done, to whom.

    Raises:
        PagingError: a graph is being captured; nothing was done, and the capture goes on.
    """
    if captures(device):
        raise PagingError(
            f"{what} while a graph is captured. Paging waits for the device, which no capture "
            "allows, and a replay would read the addresses of now, where other weights lie by "
            "then. Nothing was done. Capture a model that is not paged: call unpage() before, and "
            "move it to the device."
        )


def after_captures(device: torch.device, close: Callable[[], None]) -> None:
    """Give memory back now; while a graph is captured, at the first call of this after it."""
    _later.append(close)
    if not captures(device):
        while _later:
            with suppress(IndexError):  # another thread may have taken the last one
                _later.pop()()
