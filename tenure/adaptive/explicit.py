"""toma's explicit calls: the function is an argument, and nothing has to be decorated.

A size is remembered for the code of the function, so a new closure of the same code knows it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from tenure._torch.compiler import never_compiled

from ._callables import check_function
from ._decorators import Options, call_batch, call_chunked, call_range
from ._sizes import checked_size, stands_for

T = TypeVar("T")


def _options(name: str, func: object, initial_name: str, initial: object) -> Options:
    check_function(name, func)
    return Options(initial=checked_size(initial_name, initial), owner=stands_for(func))


@never_compiled
def batch(func: Callable[..., T], initial_batchsize: int, *args: Any, **kwargs: Any) -> T:
    """Return ``func(batch_size, *args, **kwargs)``, tried with smaller sizes until it fits.

    Args:
        func: a function of a batch size and more.
        initial_batchsize: the batch size to begin with.
        *args: what ``func`` gets after the batch size.
        **kwargs: what ``func`` gets by name; ``toma_context``: what the size is remembered for,
            by default the function and the call; ``toma_cache_type``: how it is remembered, by
            default as ``DEFAULT_CACHE_TYPE`` says.

    Raises:
        OutOfRetriesError: it ran out of memory at every size.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.explicit.batch``, https://github.com/BlackHC/toma.
    """
    options = _options("explicit.batch", func, "initial_batchsize", initial_batchsize)
    result: T = call_batch(options, func, *args, **kwargs)
    return result


@never_compiled
def range(
    func: Callable[..., object],
    start: int,
    end: int,
    initial_step: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call ``func(start, end, *args, **kwargs)`` with one piece of a range after the other.

    Args:
        func: a function of the start and the end of a piece, and more.
        start: the first number.
        end: the number after the last.
        initial_step: the size of the first piece.
        *args: what ``func`` gets after the start and the end.
        **kwargs: what ``func`` gets by name; ``toma_context``: what the step is remembered for,
            by default the function and the call; ``toma_cache_type``: how it is remembered, by
            default as ``DEFAULT_CACHE_TYPE`` says.

    Raises:
        OutOfRetriesError: a piece ran out of memory at every step.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.explicit.range``, https://github.com/BlackHC/toma.
    """
    options = _options("explicit.range", func, "initial_step", initial_step)
    call_range(options, func, start, end, *args, **kwargs)


@never_compiled
def chunked(
    func: Callable[..., object],
    tensor: Tensor,
    initial_step: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call ``func(chunk, start, end, *args, **kwargs)`` with one chunk after the other.

    Args:
        func: a function of a chunk, its start and its end, and more.
        tensor: of any dtype and device, with at least one dimension.
        initial_step: the size of the first chunk.
        *args: what ``func`` gets after the chunk, its start and its end.
        **kwargs: what ``func`` gets by name; ``toma_context``: what the step is remembered for,
            by default the function and the call; ``toma_cache_type``: how it is remembered, by
            default as ``DEFAULT_CACHE_TYPE`` says; ``toma_dimension``: the dimension to
            split, by default the first.

    Raises:
        OutOfRetriesError: a chunk ran out of memory at every step.
        AdaptiveUsageError: an argument can't be used.

    Source: ``toma.explicit.chunked``, https://github.com/BlackHC/toma.
    """
    options = _options("explicit.chunked", func, "initial_step", initial_step)
    call_chunked(options, func, tensor, *args, **kwargs)
