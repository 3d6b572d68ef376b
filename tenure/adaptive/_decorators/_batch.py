"""``@batch``: a function of a batch size, tried with smaller ones until it fits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from tenure._errors import AdaptiveUsageError
from tenure._torch.compiler import never_compiled

from .._sizes import CacheType
from ._adaptive_function import AdaptiveFunction
from ._options import AdaptiveOptions, Options, checked_options
from ._run import run_batch

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


class BatchFunction(AdaptiveFunction, Generic[P, T_co]):
    """A function decorated with `batch`: it is called without its batch size."""

    _entry = "tenure.adaptive.batch"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: BatchFunction[Concatenate[S, Q], T], instance: S, owner: type | None = None
    ) -> BatchFunction[Q, T]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The function of an instance or a class."""
        return self._bound(instance, owner)

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(
        self,
        *args: Any,
        toma_initial_batchsize: int,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> T_co: ...
    @overload
    def __call__(
        self, *args: Any, toma_context: Any, toma_cache_type: CacheType | None = None, **kwargs: Any
    ) -> T_co: ...
    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]  # it thinks of toma_context=**
        self, *args: Any, toma_cache_type: CacheType | None, **kwargs: Any
    ) -> T_co: ...
    @never_compiled  # type: ignore[misc]  # mypy does not see P in *args and **kwargs
    def __call__(
        self,
        *args: Any,
        toma_initial_batchsize: int | None = None,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the function with the largest batch size that fits and is known to.

        Args:
            *args: what the function gets after its batch size.
            toma_initial_batchsize: the batch size to begin with, for this call.
            toma_context: what the size is remembered for, for this call.
            toma_cache_type: how it is remembered, for this call.
            **kwargs: what the function gets by name.

        Raises:
            OutOfRetriesError: it ran out of memory at every size that is allowed.
            RemoteRankError: of a ``group``: it has failed on another rank.
            AdaptiveUsageError: there is no batch size to begin with, or it is not allowed.
        """
        # a method, called by what stands above it in the class, or through the class
        if self._classes and args and self._is_method_of(args[0]):
            self, args = self._bound(args[0], None), args[1:]
        initial = self._begin(toma_initial_batchsize)
        if initial is None:
            raise AdaptiveUsageError(
                f"{self._name}() has no batch size to begin with. Give initial_batchsize=, "
                "maximum=, or toma_initial_batchsize= in the call."
            )
        remembered = self._remembered(toma_context, toma_cache_type, args, kwargs)
        try:
            return run_batch(
                self._name,
                self._function,
                initial,
                args=args,
                kwargs=kwargs,
                options=self._options,
                remembered=remembered,
            )
        # toma's and accelerate's users know functions that are called with a size: the error of the
        # function, which counts one argument too many, is told why
        except TypeError as error:
            if _got_a_size(self._function, args, kwargs):
                error.add_note(
                    f"{self._name}() gets its batch size from tenure, before what it is called "
                    f"with. Call it without one: leave {args[0]!r} out."
                )
            raise


def _got_a_size(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a function can't be called with what it got, and could without its first number."""
    if not args or not isinstance(args[0], int):
        return False
    try:
        signature = inspect.signature(function)
        signature.bind(1, *args[1:], **kwargs)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(1, *args, **kwargs)
    except TypeError:
        return True
    return False


class BatchDecorator(Protocol):
    """What `batch` with arguments returns."""

    @overload
    def __call__(self, func: Callable[Concatenate[int, P], T], /) -> BatchFunction[P, T]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, int, P], T], /
    ) -> BatchFunction[Concatenate[S, P], T]: ...


@overload
def batch(func: Callable[Concatenate[int, P], T], /) -> BatchFunction[P, T]: ...
@overload
def batch(func: Callable[Concatenate[S, int, P], T], /) -> BatchFunction[Concatenate[S, P], T]: ...
@overload
def batch(
    *, initial_batchsize: int | None = None, **options: Unpack[AdaptiveOptions]
) -> BatchDecorator: ...
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
            grow beyond the initial one; ``reduce``: a function of the failed size and its OomInfo
            that gives the next, moved into what is allowed; ``restore_rng``: whether a failed
            attempt leaves random generators as they were; ``on_retry``: called with each
            AdaptiveEvent; ``cpu_fallback``: whether what fits at no size runs with its tensors on
            the CPU; ``group``: the process group whose ranks all make each call, and run with the
            same size.

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
    if func is None:
        return functools.partial(
            _decorated, initial_batchsize, checked_options("initial_batchsize", **options)
        )
    return _decorated(initial_batchsize, checked_options("initial_batchsize", **options), func)


def _decorated(initial: int | None, options: Options, func: Any) -> BatchFunction[Any, Any]:
    return BatchFunction(func, initial, options)
