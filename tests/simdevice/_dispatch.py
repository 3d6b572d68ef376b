"""Registration of Python kernels, and what every one of them promises.

A kernel that raises leaves no reference behind: a C++ kernel's frame holds no tensor once it has
failed, so the Python frames that stand for it must not hold any through the traceback either.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._torch_backend import DEVICE_TYPE

_libraries: list[torch.library.Library] = []


def kernel(run: Callable[..., Any]) -> Callable[..., Any]:
    """Cut the frames of `run` from the traceback of errors that torch or the machine raise."""

    @functools.wraps(run)
    def unwound(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            failure = error.with_traceback(None)
        del args, kwargs
        try:
            raise failure
        finally:
            del failure  # else the frame and the error would keep each other alive

    return unwound


def register(kernels: dict[str, Callable[..., Any]], key: str = "PrivateUse1") -> None:
    """Register kernels of `aten`, by operator name, for a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    for name, run in kernels.items():
        library.impl(name, run, key)
    _libraries.append(library)  # the kernels are unregistered when it dies


def register_fallback(run: Callable[..., Any], key: str) -> None:
    """Register what runs for every operator without a kernel of its own."""
    library = torch.library.Library("_", "IMPL")
    library.fallback(run, key)
    _libraries.append(library)


def require_own_device(device: torch.device) -> None:
    """Refuse what is not the simulated device.

    Raises:
        ValueError: a device of another type.
        RuntimeError: an index that does not exist.
    """
    if device.type != DEVICE_TYPE:
        raise ValueError(f"Expected a {DEVICE_TYPE} device, but got: {device}")
    require_first_device(device)


def require_first_device(device: torch.device | None) -> None:
    """Refuse a device index that does not exist.

    Raises:
        RuntimeError: the index is neither absent nor 0.
    """
    if device is not None and device.type == DEVICE_TYPE and device.index not in (None, 0):
        raise RuntimeError(
            f"invalid device ordinal: there is no {device}; the simulated machine has one"
            f" device, {DEVICE_TYPE}:0."
        )
