"""`tensor.to("sim")` means the current device, where torch asks a guard that knows one device only.

Installed by the first start with several devices. `torch.tensor(..., device="sim")` asks that guard
too and stays with `sim:0`.
"""

import functools
from typing import Any

import torch

from .._device._which import index_of
from .._torch_backend import DEVICE_TYPE, sim_device


@functools.cache
def install() -> None:
    """Replace `Tensor.to`, which `Module.to` calls as well."""
    torch.Tensor.to = _with_index(torch.Tensor.to)  # type: ignore[method-assign]


def _with_index(plain: Any) -> Any:
    @functools.wraps(plain)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _resolved(kwargs["device"])
        moved: torch.Tensor = plain(tensor, *map(_resolved, args), **kwargs)
        return moved

    return to


def _resolved(value: Any) -> Any:
    if not isinstance(value, (str, torch.device)):
        return value
    asked = torch.device(value)
    is_open = asked.type == DEVICE_TYPE and asked.index is None
    return sim_device(index_of(None)) if is_open else value
