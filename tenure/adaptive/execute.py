"""toma's decorators that run their function at once: the name becomes its result.

Sizes are remembered for the place in the program, because the function is new each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, Unpack, overload

from torch import Tensor

from tenure._torch.compiler import never_compiled

from ._callables import check_function, name_of
from ._decorators import (
    AdaptiveOptions,
    Chunk,
    Collect,
    Piece,
    Reducer,
    checked_dimension,
    checked_options,
    checked_range,
    collector_for,
    run_batch,
    run_pieces,
)
from ._sizes import calling_frame, checked_initial, checked_size, remembered_of

T = TypeVar("T")
R = TypeVar("R")
ReducerT = TypeVar("ReducerT", bound=Reducer)


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
    checked = checked_options("initial_batchsize", **options)
    initial = checked_size("initial_batchsize", initial_batchsize)
    checked_initial("initial_batchsize", initial, checked.limits)

    @never_compiled
    def execute(func: Callable[[int], T]) -> T:
        check_function("@execute.batch", func)
        frame = calling_frame()
        remembered = remembered_of(None, frame, checked.context, checked.cache_type, (), {})
        result: T = run_batch(
            name_of(func), func, initial, args=(), kwargs={}, options=checked, remembered=remembered
        )
        return result

    return execute


@overload
def range(
    start: int,
    end: int,
    initial_step: int | None = None,
    *,
    collect: None = None,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[int, int], object]], None]: ...
@overload
def range(
    start: int,
    end: int,
    initial_step: int | None = None,
    *,
    collect: Literal["list"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[int, int], T]], list[T]]: ...
@overload
def range(
    start: int,
    end: int,
    initial_step: int | None = None,
    *,
    collect: Literal["cat", "host"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[int, int], T]], T]: ...
@overload
def range(
    start: int,
    end: int,
    initial_step: int | None = None,
    *,
    collect: ReducerT,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[int, int], object]], ReducerT]: ...
@overload
def range(
    start: int,
    end: int,
    initial_step: int | None = None,
    *,
    collect: Callable[[list[T]], R],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[int, int], T]], R]: ...
def range(
    start: int,
    end: int,
    initial_step: int | None = None,
    *,
    collect: Collect | None = None,
    progress: bool = False,
    **options: Any,
) -> Any:
    """Run the decorated function at once, with one piece of a range after the other.

    Args:
        start: the first number.
        end: the number after the last.
        initial_step: the size of the first piece; None: ``maximum``, or the whole range.
        collect: as of `tenure.adaptive.range`.
        progress: whether to show a progress bar.
        **options: as of `tenure.adaptive.range`.

    Returns:
        A decorator that gives what ``collect`` makes of the results; None without it.

    Raises:
        OutOfRetriesError: a piece ran out of memory at every step that is allowed.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.execute.range``, https://github.com/BlackHC/toma.
    """
    checked = checked_options("initial_step", **options)
    start, end = checked_range("execute.range", start, end)
    initial = checked_initial("initial_step", initial_step, checked.limits)
    make_collector = collector_for(collect)

    @never_compiled
    def execute(func: Callable[[int, int], Any]) -> Any:
        check_function("@execute.range", func)
        # Asked for here, for it is the frame above this one.
        frame = calling_frame()
        remembered = remembered_of(None, frame, checked.context, checked.cache_type, (), {})
        piece = Piece(func, start, (), {})
        return run_pieces(
            name_of(func),
            piece,
            end,
            initial=initial,
            options=checked,
            remembered=remembered,
            collect=make_collector,
            progress=progress,
        )

    return execute


@overload
def chunked(
    tensor: Tensor,
    initial_step: int | None = None,
    dimension: int | None = None,
    *,
    collect: None = None,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[Tensor, int, int], object]], None]: ...
@overload
def chunked(
    tensor: Tensor,
    initial_step: int | None = None,
    dimension: int | None = None,
    *,
    collect: Literal["list"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[Tensor, int, int], T]], list[T]]: ...
@overload
def chunked(
    tensor: Tensor,
    initial_step: int | None = None,
    dimension: int | None = None,
    *,
    collect: Literal["cat", "host"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[Tensor, int, int], T]], T]: ...
@overload
def chunked(
    tensor: Tensor,
    initial_step: int | None = None,
    dimension: int | None = None,
    *,
    collect: ReducerT,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[Tensor, int, int], object]], ReducerT]: ...
@overload
def chunked(
    tensor: Tensor,
    initial_step: int | None = None,
    dimension: int | None = None,
    *,
    collect: Callable[[list[T]], R],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[[Tensor, int, int], T]], R]: ...
def chunked(
    tensor: Tensor,
    initial_step: int | None = None,
    dimension: int | None = None,
    *,
    collect: Collect | None = None,
    progress: bool = False,
    **options: Any,
) -> Any:
    """Run the decorated function at once, with one chunk of a tensor after the other.

    Args:
        tensor: of any dtype and device, with at least one dimension.
        initial_step: the size of the first chunk; None: ``maximum``, or the whole tensor.
        dimension: the dimension to split; None: the first.
        collect: as of `tenure.adaptive.chunked`.
        progress: whether to show a progress bar.
        **options: as of `tenure.adaptive.chunked`.

    Returns:
        A decorator that gives what ``collect`` makes of the results; None without it.

    Raises:
        OutOfRetriesError: a chunk ran out of memory at every step that is allowed.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.execute.chunked``, https://github.com/BlackHC/toma.
    """
    checked = checked_options("initial_step", **options)
    split = checked_dimension("execute.chunked", tensor, 0 if dimension is None else dimension)
    initial = checked_initial("initial_step", initial_step, checked.limits)
    make_collector = collector_for(collect)

    @never_compiled
    def execute(func: Callable[[Tensor, int, int], Any]) -> Any:
        check_function("@execute.chunked", func)
        frame = calling_frame()
        remembered = remembered_of(
            None, frame, checked.context, checked.cache_type, (), {}, split=(tensor, split)
        )
        chunk = Chunk(func, tensor, split, (), {})
        end = tensor.shape[split]
        return run_pieces(
            name_of(func),
            chunk,
            end,
            initial=initial,
            options=checked,
            remembered=remembered,
            collect=make_collector,
            progress=progress,
        )

    return execute
