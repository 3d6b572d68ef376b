"""``@range``: a function of the start and the end of a piece, over a whole range of numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import index
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from tenure._errors import AdaptiveUsageError
from tenure._torch.compiler import never_compiled

from .._sizes import CacheType
from ._adaptive_function import PiecesFunction
from ._collect import Collect, Reducer
from ._options import AdaptiveOptions, checked_options
from ._run import Piece

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)
ReducerT = TypeVar("ReducerT", bound=Reducer)


class RangeFunction(PiecesFunction, Generic[P, R_co]):
    """A function decorated with `range`: it is called with the whole range."""

    _entry = "tenure.adaptive.range"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: RangeFunction[Concatenate[S, Q], T], instance: S, owner: type | None = None
    ) -> RangeFunction[Q, T]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The function of an instance or a class."""
        return self._bound(instance, owner)

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self,
        start: int,
        end: int,
        *args: Any,
        toma_initial_step: int,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self,
        start: int,
        end: int,
        *args: Any,
        toma_context: Any,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]  # it thinks of toma_context=**
        self, start: int, end: int, *args: Any, toma_cache_type: CacheType | None, **kwargs: Any
    ) -> R_co: ...
    @never_compiled  # type: ignore[misc]  # mypy does not see P in *args and **kwargs
    def __call__(  # pyright: ignore[reportInconsistentOverload]  # P has them
        self,
        start: int,
        end: int,
        *args: Any,
        toma_initial_step: int | None = None,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the function with one piece of ``start``..``end`` after the other.

        Args:
            start: the first number.
            end: the number after the last.
            *args: what the function gets after the start and the end of its piece.
            toma_initial_step: the step to begin with, for this call.
            toma_context: what the step is remembered for, for this call.
            toma_cache_type: how it is remembered, for this call.
            **kwargs: what the function gets by name.

        Returns:
            What ``collect`` makes of the results; None without it.

        Raises:
            OutOfRetriesError: a piece ran out of memory at every step that is allowed.
            AdaptiveUsageError: an argument can't be used.
        """
        if self._classes and args and self._is_method_of(start):
            self, start, end, args = self._bound(start, None), end, args[0], args[1:]
        start, end = checked_range(self._name, start, end)
        remembered = self._remembered(toma_context, toma_cache_type, args, kwargs)
        piece = Piece(self._function, start, args, kwargs)
        return self._run(piece, end, toma_initial_step, remembered)


@overload
def range(func: Callable[P, object], /) -> RangeFunction[P, None]: ...
@overload
def range(
    *,
    initial_step: int | None = None,
    collect: None = None,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[P, object]], RangeFunction[P, None]]: ...
@overload
def range(
    *,
    initial_step: int | None = None,
    collect: Literal["list"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[P, T]], RangeFunction[P, list[T]]]: ...
@overload
def range(
    *,
    initial_step: int | None = None,
    collect: Literal["cat", "host"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[P, T]], RangeFunction[P, T]]: ...
@overload
def range(
    *,
    initial_step: int | None = None,
    collect: ReducerT,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[P, object]], RangeFunction[P, ReducerT]]: ...
@overload
def range(
    *,
    initial_step: int | None = None,
    collect: Callable[[list[T]], R],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> Callable[[Callable[P, T]], RangeFunction[P, R]]: ...
def range(
    func: Any = None,
    /,
    *,
    initial_step: int | None = None,
    collect: Collect | None = None,
    progress: bool = False,
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
            along the first dimension; ``"host"``, the same on the host, where each is copied while
            the next is computed; a function of the list; an object with an ``update()`` method,
            such as a metric, which takes each result and is returned; None: the call returns None.
        progress: whether to show a progress bar.
        **options: as of `batch`.

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
    make: Callable[[Any], RangeFunction[Any, Any]] = functools.partial(
        RangeFunction[Any, Any],
        initial=initial_step,
        options=checked_options("initial_step", **options),
        collect=collect,
        progress=progress,
    )
    return make if func is None else make(func)


def checked_range(name: str, start: Any, end: Any) -> tuple[int, int]:
    """The ends of a range, as ints.

    Raises:
        AdaptiveUsageError: one is no whole number.
    """
    try:
        return index(start), index(end)
    except TypeError:
        raise AdaptiveUsageError(
            f"{name}() got the range {start!r} to {end!r}. Its first two arguments are the first "
            "number and the one after the last, as ints."
        ) from None
