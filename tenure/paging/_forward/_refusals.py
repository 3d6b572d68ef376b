"""What a paged model is refused: to be captured, to be traced, and to be trained.

Invariant: no wait, no event and no address of a paged model gets into a capture or a trace. What
asks for one is refused by name before anything is done; memory of a model that is garbage waits for
the end of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from tenure._errors import PagingError
from tenure._graph_capture import captures_somewhere, is_capturing
from tenure._torch.autograd import is_transformed

from .._model import HostTensor

_later: list[Callable[[], None]] = []


def captures(device: torch.device, *, waits: bool = False) -> bool:
    """Return whether this thread captures a graph, on the current or on this device.

    Args:
        device: this one.
        waits: whether the caller waits for the whole device; then captures of any thread count.
    """
    if is_capturing(device) or (waits and captures_somewhere(device)):
        return True
    if device.type == "cpu":
        return False
    module = torch.get_device_module(device)
    if module.current_device() == device.index:
        return False
    # A capture is asked for of the current device: with the model on a second one, of both.
    with module.device(device):
        return is_capturing(device)


def check_capture(device: torch.device, what: str, *, waits: bool = False) -> None:
    """Refuse what must not happen while a graph is captured.

    Args:
        device: where the model is paged to.
        what: what was done, to whom.
        waits: whether it waits for all of the device, and so breaks captures of other threads.

    Raises:
        PagingError: a graph is being captured; nothing was done, and the capture goes on.
    """
    if captures(device, waits=waits):
        raise PagingError(
            f"{what} while a graph is captured. Paging waits for the device, which no capture "
            "allows, and a replay would read the addresses of now, where other weights lie by "
            "then. Nothing was done. Capture a model that is not paged: call unpage() before, and "
            "move it to the device."
        )


def after_captures(device: torch.device, close: Callable[[], None]) -> None:
    """Give memory back now; while any graph is captured, at the first call of this after it."""
    _later.append(close)
    while not captures(device, waits=True):
        try:
            due = _later.pop()
        except IndexError:
            # None is left; another thread may have taken the last one.
            return
        due()


def check_trace(module: nn.Module) -> None:
    """Refuse a pass of this module that is traced.

    Raises:
        PagingError: it is.
    """
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise PagingError(
            f"{type(module).__name__} is traced by torch.jit while it is paged: the trace "
            "would keep the places that weights pass through, and read others there later. "
            "Call unpage() first."
        )


def check_inference(module: nn.Module, hosts: Collection[HostTensor]) -> str | None:
    """Refuse a pass with gradients on that would train a model paged for inference.

    Returns:
        A warning of gradients that nobody gets, if a parameter asks for them.

    Raises:
        PagingError: it would train.
    """
    asking = _asking(hosts)
    if not asking:
        return None
    if module.training:
        raise PagingError(
            f"{type(module).__name__} was called in training mode with gradients on, and its "
            "parameters are paged for inference: they would get no gradients. Nothing ran. "
            "Call eval(), or run under torch.no_grad(); to train, page it with training=True."
        )
    which = f"{len(asking)} of its parameters ask" if asking[1:] else "a parameter asks"
    return (
        f"{type(module).__name__} is paged for inference and was called with gradients on, "
        f"and {which} for them, {asking[0].name!r} for one: they get none. Call it under "
        "torch.no_grad(), or freeze them with requires_grad_(False); to train them, page "
        "it with training=True."
    )


def check_training(module: nn.Module, hosts: Collection[HostTensor]) -> None:
    """Refuse a pass with gradients on, not all of which could get to their parameters.

    Raises:
        PagingError: a transform differentiates it, or a parameter that asks for gradients can't be
            paged.
    """
    if is_transformed():
        raise PagingError(
            f"{type(module).__name__} is paged for training and was called inside a transform "
            "of torch.func, whose gradients don't pass through weights that are paged. Use "
            "backward() or torch.autograd.grad(), or unpage() first."
        )
    whole = [host.name for host in _asking(hosts) if host.unit is None]
    if whole:
        raise PagingError(
            f"{whole[0]!r} asks for gradients and can't be trained while it is paged: it is a "
            "tensor subclass, or empty, and its gradients would not get home. Freeze it with "
            "requires_grad_(False), or unpage() first."
        )


def _asking(hosts: Collection[HostTensor]) -> list[HostTensor]:
    """Return the parameters that ask for gradients now: a user may freeze them at any time."""
    return [host for host in hosts if not host.is_buffer and host.tensor.requires_grad]
