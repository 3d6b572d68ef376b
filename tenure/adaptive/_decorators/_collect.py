"""What becomes of the results of the pieces of a range or of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from tenure._containers import level_of
from tenure._errors import AdaptiveUsageError

Collect = Literal["list", "cat"] | Callable[[list[Any]], Any]
Collector = Callable[[list[Any], int], Any]
"""Takes the results in their order, and the dimension that was split."""


def collector_for(collect: Collect | None) -> Collector | None:
    """How results are put together; None where they are let go, one by one.

    Raises:
        AdaptiveUsageError: ``collect`` is none of its values.
    """
    if collect is None:
        return None
    if collect == "list":
        return _listed
    if collect == "cat":
        return _concatenated
    if callable(collect):
        return functools.partial(_given_to, collect)
    raise AdaptiveUsageError(
        f'collect={collect!r} is none of "list", "cat", a function of the list of results, or None.'
    )


def _listed(results: list[Any], dimension: int) -> Any:
    return results


def _given_to(function: Callable[[list[Any]], Any], results: list[Any], dimension: int) -> Any:
    return function(results)


def _concatenated(results: list[Any], dimension: int) -> Any:
    if not results:
        raise AdaptiveUsageError(
            'collect="cat" has nothing to concatenate: there was no piece to work on. Use '
            'collect="list" where that may be.'
        )
    return _joined(results, dimension)


def _joined(results: list[Any], dimension: int) -> Any:
    """Tensors along the dimension; tuples, lists and dicts of them entry by entry."""
    first = results[0]
    if other := next((_form(each) for each in results if _form(each) != _form(first)), None):
        raise AdaptiveUsageError(
            f'collect="cat" can\'t concatenate {_form(first)} and {other}. Return the same '
            "structure for each piece, or give a function of the list of results."
        )
    if isinstance(first, Tensor):
        return _cat(results, dimension)
    level = level_of(first) if isinstance(first, dict | tuple | list) else None
    if level is not None:
        # by key: the dicts of two pieces may have their keys in different orders
        entries = [[each[key] for each in results] for key in level.keys]
        return level.make([_joined(entry, dimension) for entry in entries])
    raise AdaptiveUsageError(
        f'collect="cat" can\'t concatenate a result of type {type(first).__name__}. Return tensors '
        "with at least one dimension, or tuples, lists or dicts of them; or give a function of the "
        "list of results."
    )


def _cat(tensors: list[Tensor], dimension: int) -> Tensor:
    try:
        return torch.cat(tensors, dimension)
    except RuntimeError:
        if all(tensor.dim() for tensor in tensors):
            raise
    raise AdaptiveUsageError(
        'collect="cat" can\'t concatenate tensors that have no dimension. Return them with one, as '
        'x[None], or use collect="list".'
    )


def _form(result: Any) -> str:
    if isinstance(result, Tensor):
        return "a tensor"
    if isinstance(result, dict):
        return f"a dict of {', '.join(sorted(map(repr, result))) or 'nothing'}"
    if isinstance(result, tuple | list):
        return f"a tuple or list of {len(result)}"
    return f"a {type(result).__name__}"
