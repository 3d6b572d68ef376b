"""toma's decorators that run their function at once: the name becomes its result.

Sizes are remembered for the place in the program, because the function is new each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

from torch import Tensor

from tenure._torch.compiler import never_compiled

from ._callables import check_function
from ._decorators import (
    AdaptiveOptions,
    Collect,
    Options,
    call_batch,
    call_chunked,
    call_range,
    checked_options,
)
from ._sizes import checked_size

T = TypeVar("T")


def _at_once(call: Callable[..., Any], options: Options, *args: Any) -> Callable[[Any], Any]:
    @never_compiled
    def execute(func: Any) -> Any:
        check_function(f"@execute.{call.__name__.removeprefix('call_')}", func)
        return call(options, func, *args)

    return execute


def batch(
    initial_batchsize: int, **options: Unpack[AdaptiveOptions]
) -> Callable[[Callable[[int], T]], T]:
    """Run the decorated function at once with a batch size, and smaller ones until it fits.

    Args:
        initial_batchsize: the batch size to begin with.
        **options: as of `tenure.adaptive.batch`.

    Returns:
        A decorator that gives what the function returned.

    Raises:
        OutOfRetriesError: it ran out of memory at every size that is allowed.
        AdaptiveUsageError: an argument can't be used.

    Example:
        >>> import torch
        >>> from tenure.adaptive import execute
        >>> @execute.batch(64)
        ... def found(batch_size: int) -> int:
        ...     if batch_size > 20:
        ...         raise torch.OutOfMemoryError("CUDA out of memory.")
        ...     return batch_size
        >>> found
        16

    Source: ``toma.execute.batch``, https://github.com/BlackHC/toma.
    """
    initial = checked_size("initial_batchsize", initial_batchsize)
    return _at_once(call_batch, checked_options("initial_batchsize", initial, **options))


def range(
    start: int,
    end: int,
    initial_step: int | None = None,
    *,
    collect: Collect | None = None,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[..., Any]], Any]:
    """Run the decorated function at once, with one piece of a range after the other.

    Args:
        start: the first number.
        end: the number after the last.
        initial_step: the size of the first piece; None: ``maximum``, or the whole range.
        collect: as of `tenure.adaptive.range`.
        **options: as of `tenure.adaptive.range`.

    Returns:
        A decorator that gives what ``collect`` makes of the results; None without it.

    Raises:
        OutOfRetriesError: a piece ran out of memory at every step that is allowed.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.execute.range``, https://github.com/BlackHC/toma.
    """
    checked = checked_options("initial_step", initial_step, collect=collect, **options)
    return _at_once(call_range, checked, start, end)


def chunked(
    tensor: Tensor,
    initial_step: int | None = None,
    dimension: int | None = None,
    *,
    collect: Collect | None = None,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[..., Any]], Any]:
    """Run the decorated function at once, with one chunk of a tensor after the other.

    Args:
        tensor: of any dtype and device, with at least one dimension.
        initial_step: the size of the first chunk; None: ``maximum``, or the whole tensor.
        dimension: the dimension to split; None: the first.
        collect: as of `tenure.adaptive.chunked`.
        **options: as of `tenure.adaptive.chunked`.

    Returns:
        A decorator that gives what ``collect`` makes of the results; None without it.

    Raises:
        OutOfRetriesError: a chunk ran out of memory at every step that is allowed.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.execute.chunked``, https://github.com/BlackHC/toma.
    """
    checked = checked_options(
        "initial_step",
        initial_step,
        collect=collect,
        dimension=dimension or 0,
        **options,
    )
    return _at_once(call_chunked, checked, tensor)
