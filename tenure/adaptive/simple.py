"""toma's simplest calls, which remember nothing: each begins with its initial size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from tenure._torch.compiler import never_compiled

from ._callables import check_function
from ._decorators import Options, call_batch, call_chunked, call_range
from ._sizes import NoBatchsizeCache, checked_size

P = ParamSpec("P")
T = TypeVar("T")


def _options(name: str, func: object, initial_name: str, initial: object) -> Options:
    check_function(name, func)
    return Options(initial=checked_size(initial_name, initial), cache_type=NoBatchsizeCache)


@never_compiled
def batch(
    func: Callable[Concatenate[int, P], T],
    initial_batchsize: int,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Return ``func(batch_size, *args, **kwargs)``, tried with smaller sizes until it fits.

    Args:
        func: a function of a batch size and more.
        initial_batchsize: the batch size to begin with.
        *args: what ``func`` gets after the batch size.
        **kwargs: what ``func`` gets by name.

    Raises:
        OutOfRetriesError: it ran out of memory at every size.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.simple.batch``, https://github.com/BlackHC/toma.
    """
    options = _options("simple.batch", func, "initial_batchsize", initial_batchsize)
    result: T = call_batch(options, func, *args, **kwargs)  # type: ignore[arg-type]  # P has toma_*
    return result


@never_compiled
def range(
    func: Callable[Concatenate[int, int, P], object],
    start: int,
    end: int,
    initial_step: int,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Call ``func(start, end, *args, **kwargs)`` with one piece of a range after the other.

    Args:
        func: a function of the start and the end of a piece, and more.
        start: the first number.
        end: the number after the last.
        initial_step: the size of the first piece.
        *args: what ``func`` gets after the start and the end.
        **kwargs: what ``func`` gets by name.

    Raises:
        OutOfRetriesError: a piece ran out of memory at every step.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.simple.range``, https://github.com/BlackHC/toma.
    """
    options = _options("simple.range", func, "initial_step", initial_step)
    call_range(options, func, start, end, *args, **kwargs)  # type: ignore[arg-type]  # P has toma_*


@never_compiled
def chunked(
    func: Callable[Concatenate[Tensor, int, int, P], object],
    tensor: Tensor,
    initial_step: int,
    dimension: int = 0,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Call ``func(chunk, start, end, *args, **kwargs)`` with one chunk after the other.

    Args:
        func: a function of a chunk, its start and its end, and more.
        tensor: of any dtype and device, with at least one dimension.
        initial_step: the size of the first chunk.
        dimension: the dimension to split.
        *args: what ``func`` gets after the chunk, its start and its end.
        **kwargs: what ``func`` gets by name.

    Raises:
        OutOfRetriesError: a chunk ran out of memory at every step.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.simple.chunked``, https://github.com/BlackHC/toma.
    """
    options = _options("simple.chunked", func, "initial_step", initial_step)
    named = {**kwargs, "toma_dimension": dimension}
    call_chunked(options, func, tensor, *args, **named)  # type: ignore[arg-type]  # P has toma_*
