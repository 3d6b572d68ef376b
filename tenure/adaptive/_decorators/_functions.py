"""``@batch``, ``@range`` and ``@chunked``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, Unpack, overload

from ._calls import call_batch, call_chunked, call_range, decorated
from ._collect import Collect
from ._options import AdaptiveOptions, checked_options

T = TypeVar("T")


@overload
def batch(func: Callable[..., T], /) -> Callable[..., T]: ...
@overload
def batch(
    *, initial_batchsize: int | None = None, **options: Unpack[AdaptiveOptions]
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...
def batch(func: Any = None, /, *, initial_batchsize: int | None = None, **options: Any) -> Any:
    """Call a function with a batch size; when that runs out of memory, again with a smaller one.

    The function gets the batch size first (a method after ``self``), then what it is called with.
    Every call runs it until it returns once, and gives what it returned. A failed attempt leaves no
    tensor behind. The size that worked is remembered, and the next call begins with it.

    Args:
        func: a function or method, where the decorator has no arguments.
        initial_batchsize: the batch size to begin with; None: ``maximum``, or what each call names.
        **options: ``cache_type`` and ``context``: what sizes are remembered for; ``minimum``,
            ``maximum`` and ``align``: the sizes that are allowed, where ``maximum`` lets the size
            grow beyond the initial one, and an initial size below ``align`` is tried as it is;
            ``restore_rng``: restore the random generators of torch, Python
            and NumPy, and those among the arguments, after a failed attempt; ``on_retry``: called
            with each AdaptiveEvent; ``predict``: after the first failure, run the size that
            `predict_peak` says fits, for which the function runs a few times on tensors without
            data. A call may replace the first size with ``toma_initial_batchsize``
            (``toma_initial_step``), and ``toma_dimension``, ``toma_cache_type`` and
            ``toma_context``.

    Raises:
        AdaptiveUsageError: an argument can't be used, or the function can be suspended.

    Example:
        >>> import torch
        >>> from tenure.adaptive import batch
        >>> @batch(initial_batchsize=64)
        ... def sizes_tried(batch_size: int, tried: list[int]) -> list[int]:
        ...     tried.append(batch_size)
        ...     if batch_size > 20:
        ...         raise torch.OutOfMemoryError("CUDA out of memory.")
        ...     return tried
        >>> sizes_tried([])
        [64, 32, 16]

    Source: ``toma.batch``, https://github.com/BlackHC/toma.
    """
    checked = checked_options("initial_batchsize", initial_batchsize, **options)
    decorate = functools.partial(decorated, call_batch, checked)
    return decorate if func is None else decorate(func)


@overload
def range(func: Callable[..., object], /) -> Callable[..., None]: ...
@overload
def range(
    *,
    initial_step: int | None = None,
    collect: Collect | None = None,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def range(
    func: Any = None,
    /,
    *,
    initial_step: int | None = None,
    collect: Collect | None = None,
    **options: Any,
) -> Any:
    """Call a function with one piece of a range after the other, each as large as fits.

    The function gets the start and the end of its piece first (a method after ``self``), then what
    it is called with. A piece that runs out of memory is tried again with a smaller step, and the
    pieces that are done stay done: each number is worked on once.

    Args:
        func: a function or method, where the decorator has no arguments.
        initial_step: the size of the first piece; None: ``maximum``, or the whole range.
        collect: what becomes of the results: ``"list"``, in their order; ``"cat"``, concatenated
            along the first dimension; ``"host"``, the same in host memory, copied while the next is
            computed, which raises an error for results that require grad; a function of the list;
            an object with an ``update()`` method, such as a metric, which takes each result and is
            returned; None: the call returns None.
        **options: as of `batch`, but ``predict``.

    Raises:
        AdaptiveUsageError: an argument can't be used, or the function can be suspended.

    Example:
        >>> import torch
        >>> from tenure import adaptive
        >>> @adaptive.range(initial_step=6, collect="list")
        ... def sums(start: int, end: int, x: torch.Tensor) -> float:
        ...     if end - start > 4:
        ...         raise torch.OutOfMemoryError("CUDA out of memory.")
        ...     return x[start:end].sum().item()
        >>> sums(0, 8, torch.ones(8))
        [3.0, 3.0, 2.0]

    Source: ``toma.range``, https://github.com/BlackHC/toma.
    """
    checked = checked_options("initial_step", initial_step, collect=collect, **options)
    decorate = functools.partial(decorated, call_range, checked)
    return decorate if func is None else decorate(func)


@overload
def chunked(func: Callable[..., object], /) -> Callable[..., None]: ...
@overload
def chunked(
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: Collect | None = None,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def chunked(
    func: Any = None,
    /,
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: Collect | None = None,
    **options: Any,
) -> Any:
    """Call a function with one chunk of a tensor after the other, each as large as fits.

    The function gets a chunk, which is a view of the tensor, its start and its end first (a method
    after ``self``), then what it is called with. A chunk that runs out of memory is tried again
    with a smaller step, and the chunks that are done stay done.

    Args:
        func: a function or method, where the decorator has no arguments.
        initial_step: the size of the first chunk; None: ``maximum``, or the whole tensor.
        dimension: the dimension to split.
        collect: what becomes of the results: ``"list"``, in their order; ``"cat"``, concatenated
            along ``dimension``; ``"host"``, the same in host memory, copied while the next is
            computed, which raises an error for results that require grad; a function of the list;
            an object with an ``update()`` method, such as a metric, which takes each result and is
            returned; None: the call returns None.
        **options: as of `batch`, but ``predict``.

    Raises:
        AdaptiveUsageError: an argument can't be used, or the function can be suspended.

    Example:
        >>> import torch
        >>> from tenure.adaptive import chunked
        >>> @chunked(initial_step=4, collect="cat")
        ... def squared(chunk: torch.Tensor, start: int, end: int) -> torch.Tensor:
        ...     if len(chunk) > 2:
        ...         raise torch.OutOfMemoryError("CUDA out of memory.")
        ...     return chunk**2
        >>> squared(torch.arange(5))
        tensor([ 0,  1,  4,  9, 16])

    Source: ``toma.chunked``, https://github.com/BlackHC/toma.
    """
    checked = checked_options(
        "initial_step",
        initial_step,
        collect=collect,
        dimension=dimension,
        **options,
    )
    decorate = functools.partial(decorated, call_chunked, checked)
    return decorate if func is None else decorate(func)
