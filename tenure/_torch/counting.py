"""Whether reference counts tell who holds a tensor; tenure is not imported where they don't.

Invariant: what one variable alone holds counts `SOLE` references, and a tensor that C++ holds too,
as autograd holds a gradient, counts more. Up to torch 2.9 the two count the same, and without the
GIL a count says nothing about others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

_DO = "Use torch 2.10 or later on a Python with the GIL (docs/install.md lists tested versions)."


def _count(make: Callable[[], object]) -> int:
    out = make()
    return sys.getrefcount(out)


def _count_of_gradient() -> int:
    # on the CPU: a default device would be initialized
    leaf = torch.ones(1, device="cpu", requires_grad=True)
    leaf.grad = torch.zeros(1, device="cpu")
    return _count(lambda: leaf.grad)


SOLE = _count(object)
"""``sys.getrefcount`` of what one local variable alone holds."""
OF_CPP = _count_of_gradient() - SOLE
"""How many references C++ adds to the handle of a tensor that it holds."""


def works() -> bool:
    """Whether counts are those of the whole process and C++ adds to them."""
    return OF_CPP > 0 and getattr(sys, "_is_gil_enabled", lambda: True)()


def require() -> None:
    """Make sure that reference counts tell who holds a tensor.

    Raises:
        ImportError: they don't.
    """
    if not works():
        refuse(
            "reference counts don't say what else holds a tensor, so a scope could free gradients "
            "that are in use"
        )


def refuse(reason: str) -> None:
    """Say that tenure can't be imported.

    Raises:
        ImportError: always.
    """
    raise ImportError(
        f"tenure can't be used with torch {torch.__version__} on Python {sys.version.split()[0]}: "
        f"{reason}. {_DO}"
    )
