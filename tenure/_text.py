"""Bytes, tensors, counts and lists as people read them; the same thing has the same spelling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tenure._byte_sizes import format_bytes as format_bytes
from tenure._byte_sizes import format_bytes_as_torch as format_bytes_as_torch
from tenure._byte_sizes import parse_bytes as parse_bytes
from tenure._byte_sizes import parse_share as parse_share
from tenure._storages import n_bytes_of
from tenure._torch.quiet import without_functions


def counted(n: int, noun: str) -> str:
    """Spell how many there are of something whose plural ends in s.

    Example:
        >>> counted(1, "row"), counted(2, "row"), counted(0, "row")
        ('1 row', '2 rows', '0 rows')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Spell the first of many, and how many more there are.

    Args:
        texts: each as it is to be read.
        most: how many to spell.
        separator: what stands between two; one that ends a clause, as ``"; "``, ends the last too.

    Example:
        >>> listed(["a", "b"], 2), listed(["a", "b", "c"], 1), listed(["a", "b"], 1, "; ")
        ('a, b', 'a and 2 more', 'a; and 1 more')
    """
    shown, n_more = separator.join(texts[:most]), len(texts) - most
    # "a, b and 3 more", but "a moved; b stayed; and 3 more": a clause is not the last of a list
    before = " " if separator == ", " else separator
    return f"{shown}{before}and {n_more} more" if n_more > 0 else shown


def describe(
    dtype: torch.dtype, shape: Sequence[object], device: torch.device | str, n_bytes: int
) -> str:
    """Spell a tensor that may be gone already.

    Example:
        >>> describe(torch.float16, (32, 1024), "cuda:0", 65_536)
        'float16[32, 1024] on cuda:0, 64.0 KiB'
    """
    return f"{describe_elements(dtype, shape)} on {device}, {format_bytes(n_bytes)}"


def describe_elements(dtype: torch.dtype | str, shape: Sequence[object]) -> str:
    """Spell what a tensor holds, wherever it is.

    Example:
        >>> describe_elements(torch.float16, (32, 1024))
        'float16[32, 1024]'
    """
    return f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]"


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return torch's name of a dtype, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def describe_tensor(t: torch.Tensor) -> str:
    """Spell a tensor of any layout, without running an operation on it.

    Example:
        >>> describe_tensor(torch.zeros(()))
        'float32[] on cpu, 4 B'
    """
    # an error describes tensors in the midst of an operation, with scopes and other modes around
    with without_functions():
        return describe(t.dtype, shape_of(t), t.device, n_bytes_of(t))


def shape_of(t: torch.Tensor) -> tuple[int | str, ...]:
    """Return the shape, symbolic sizes as text; for nested tensors the number of components.

    Example:
        >>> shape_of(torch.zeros(2, 3))
        (2, 3)
    """
    # a jagged one has a shape, one of the older layout raises
    try:
        # a symbol can't be written down, nor sent to another process
        return tuple([n if type(n) is int else str(n) for n in t.shape])
    except RuntimeError:
        return (t.size(0),)


def operation_of(func: Callable[..., Any]) -> str:
    """Return the name of a torch function in errors: ``exp()``, ``add()``, ``.grad``."""
    name: str = getattr(func, "__name__", None) or type(func).__name__
    if name in {"__get__", "__set__", "__delete__"}:
        return f".{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return f"{_unwrapped(name)}()"


def _unwrapped(name: str) -> str:
    return name.removeprefix("__").removesuffix("__") if name.startswith("__") else name
