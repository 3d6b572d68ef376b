"""toma's explicit calls: the function is an argument, and nothing has to be decorated.

A size is remembered for the code of the function, so a new closure of the same code knows it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from tenure._torch.compiler import never_compiled

from ._callables import check_function, name_of
from ._decorators import (
    PLAIN,
    Chunk,
    Piece,
    checked_dimension,
    checked_range,
    run_batch,
    run_pieces,
)
from ._sizes import (
    BatchsizeCache,
    Remembered,
    calling_frame,
    checked_size,
    remembered_of,
    stands_for,
)

T = TypeVar("T")


@never_compiled
def batch(
    func: Callable[..., T],
    initial_batchsize: int,
    *args: Any,
    toma_context: Any = None,
    toma_cache_type: type[BatchsizeCache] | None = None,
    **kwargs: Any,
) -> T:
    """Return ``func(batch_size, *args, **kwargs)``, tried with smaller sizes until it fits.

    Args:
        func: a function of a batch size and more.
        initial_batchsize: the batch size to begin with.
        *args: what ``func`` gets after the batch size.
        toma_context: what the size is remembered for; None: the function and the call.
        toma_cache_type: how it is remembered; None: as ``DEFAULT_CACHE_TYPE`` says.
        **kwargs: what ``func`` gets by name.

    Raises:
        OutOfRetriesError: it ran out of memory at every size.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.explicit.batch``, https://github.com/BlackHC/toma.
    """
    check_function("explicit.batch", func)
    initial = checked_size("initial_batchsize", initial_batchsize)
    remembered = _remembered(func, calling_frame(), toma_context, toma_cache_type, args, kwargs)
    result: T = run_batch(
        name_of(func), func, initial, args=args, kwargs=kwargs, options=PLAIN, remembered=remembered
    )
    return result


@never_compiled
def range(
    func: Callable[..., object],
    start: int,
    end: int,
    initial_step: int,
    *args: Any,
    toma_context: Any = None,
    toma_cache_type: type[BatchsizeCache] | None = None,
    **kwargs: Any,
) -> None:
    """Call ``func(start, end, *args, **kwargs)`` with one piece of a range after the other.

    Args:
        func: a function of the start and the end of a piece, and more.
        start: the first number.
        end: the number after the last.
        initial_step: the size of the first piece.
        *args: what ``func`` gets after the start and the end.
        toma_context: what the step is remembered for; None: the function and the call.
        toma_cache_type: how it is remembered; None: as ``DEFAULT_CACHE_TYPE`` says.
        **kwargs: what ``func`` gets by name.

    Raises:
        OutOfRetriesError: a piece ran out of memory at every step.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.explicit.range``, https://github.com/BlackHC/toma.
    """
    check_function("explicit.range", func)
    start, end = checked_range("explicit.range", start, end)
    initial = checked_size("initial_step", initial_step)
    remembered = _remembered(func, calling_frame(), toma_context, toma_cache_type, args, kwargs)
    piece = Piece(func, start, args, kwargs)
    run_pieces(name_of(func), piece, end, initial=initial, options=PLAIN, remembered=remembered)


@never_compiled
def chunked(
    func: Callable[..., object],
    tensor: Tensor,
    initial_step: int,
    *args: Any,
    toma_dimension: int | None = None,
    toma_context: Any = None,
    toma_cache_type: type[BatchsizeCache] | None = None,
    **kwargs: Any,
) -> None:
    """Call ``func(chunk, start, end, *args, **kwargs)`` with one chunk after the other.

    Args:
        func: a function of a chunk, its start and its end, and more.
        tensor: of any dtype and device, with at least one dimension.
        initial_step: the size of the first chunk.
        *args: what ``func`` gets after the chunk, its start and its end.
        toma_dimension: the dimension to split; None: the first.
        toma_context: what the step is remembered for; None: the function and the call.
        toma_cache_type: how it is remembered; None: as ``DEFAULT_CACHE_TYPE`` says.
        **kwargs: what ``func`` gets by name.

    Raises:
        OutOfRetriesError: a chunk ran out of memory at every step.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.explicit.chunked``, https://github.com/BlackHC/toma.
    """
    check_function("explicit.chunked", func)
    dimension = checked_dimension(
        "explicit.chunked", tensor, 0 if toma_dimension is None else toma_dimension
    )
    initial = checked_size("initial_step", initial_step)
    split = tensor, dimension
    remembered = _remembered(
        func, calling_frame(), toma_context, toma_cache_type, args, kwargs, split=split
    )
    chunk = Chunk(func, tensor, dimension, args, kwargs)
    run_pieces(
        name_of(func),
        chunk,
        tensor.shape[dimension],
        initial=initial,
        options=PLAIN,
        remembered=remembered,
    )


# The frame is among what is passed on: it is that of who called the function above this one.
def _remembered(func: Any, *call: Any, split: tuple[Tensor, int] | None = None) -> Remembered:
    return remembered_of(stands_for(func), *call, function=func, split=split)
