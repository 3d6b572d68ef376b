"""Whether reference counts tell who holds a tensor; if not, importing tenure raises an error.

Invariant: an object that one variable alone holds has `SOLE` references, and a tensor that C++
holds too, as autograd holds a gradient, has more. Up to torch 2.9 it has as many, and without the
GIL a count leaves out what other threads hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

import torch

_ADVICE = (
    "Use torch 2.10 or later on a Python with the GIL (docs/versions.md lists tested versions)."
)


def _count(make: Callable[[], object]) -> int:
    out = make()
    return sys.getrefcount(out)


def _count_of_gradient() -> int:
    # on the CPU: a default device would be initialized
    leaf = torch.ones(1, device="cpu", requires_grad=True)
    leaf.grad = torch.zeros(1, device="cpu")
    return _count(lambda: leaf.grad)


SOLE = _count(object)
"""``sys.getrefcount`` of an object that one local variable alone holds."""
OF_CPP = _count_of_gradient() - SOLE
"""How many references C++ adds to the handle of a tensor that it holds; 0 up to torch 2.9."""


def require() -> None:
    """Make sure that reference counts tell who holds a tensor.

    Raises:
        ImportError: they don't.
    """
    if OF_CPP == 0 or not getattr(sys, "_is_gil_enabled", lambda: True)():
        refuse_import(
            "reference counts don't say what else holds a tensor, so a scope could free gradients "
            "that are in use"
        )


def refuse_import(reason: str) -> NoReturn:
    """Raise the error that says why tenure can't be imported."""
    raise ImportError(
        f"tenure can't be used with torch {torch.__version__} on Python {sys.version.split()[0]}: "
        f"{reason}. {_ADVICE}",
        name="tenure",
    )
