"""Registration of Python kernels, and what every one of them promises.

A kernel that raises leaves no reference behind: a C++ kernel's frame holds no tensor once it has
failed, so the Python frames that stand for it must not hold any through the traceback either.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

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
            # Or the frame and the error would keep each other alive.
            del failure

    return unwound


def register(kernels: dict[str, Callable[..., Any]], key: str = "PrivateUse1") -> None:
    """Register kernels of `aten`, by operator name, for a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    for name, run in kernels.items():
        library.impl(name, run, key)
    # Kept, for the kernels are unregistered when it dies.
    _libraries.append(library)


def register_fallback(run: Callable[..., Any], key: str) -> None:
    """Register what runs for every operator without a kernel of its own."""
    library = torch.library.Library("_", "IMPL")
    library.fallback(run, key)
    _libraries.append(library)
