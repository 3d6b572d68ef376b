"""``@chunked``: a function of a chunk of a tensor and its place, over the whole tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import index
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.compiler import never_compiled

from .._sizes import CacheType
from ._adaptive_function import PiecesFunction
from ._collect import Collect, Reducer
from ._options import AdaptiveOptions, Options, checked_options
from ._run import Chunk

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
ReducerT = TypeVar("ReducerT", bound=Reducer)


class ChunkedFunction(PiecesFunction, Generic[P, R_co]):
    """A function decorated with `chunked`: it is called with the whole tensor."""

    _entry = "tenure.adaptive.chunked"

    def __init__(
        self,
        function: Callable[..., Any],
        initial: int | None,
        options: Options,
        *,
        collect: Collect | None,
        progress: bool,
        dimension: int,
    ) -> None:
        super().__init__(function, initial, options, collect=collect, progress=progress)
        self._dimension = dimension

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: ChunkedFunction[Concatenate[S, Q], T], instance: S, owner: type | None = None
    ) -> ChunkedFunction[Q, T]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The function of an instance or a class."""
        return self._bound(instance, owner)

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self,
        tensor: Tensor,
        *args: Any,
        toma_initial_step: int,
        toma_dimension: int | None = None,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self,
        tensor: Tensor,
        *args: Any,
        toma_dimension: int,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(
        self,
        tensor: Tensor,
        *args: Any,
        toma_context: Any,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> R_co: ...
    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]  # it thinks of toma_context=**
        self, tensor: Tensor, *args: Any, toma_cache_type: CacheType | None, **kwargs: Any
    ) -> R_co: ...
    @never_compiled  # type: ignore[misc]  # mypy does not see P in *args and **kwargs
    def __call__(  # pyright: ignore[reportInconsistentOverload]  # P has them
        self,
        tensor: Tensor,
        *args: Any,
        toma_initial_step: int | None = None,
        toma_dimension: int | None = None,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the function with one chunk of ``tensor`` after the other.

        Args:
            tensor: of any dtype and device, with at least one dimension.
            *args: what the function gets after the chunk, its start and its end.
            toma_initial_step: the step to begin with, for this call.
            toma_dimension: the dimension to split, for this call.
            toma_context: what the step is remembered for, for this call.
            toma_cache_type: how it is remembered, for this call.
            **kwargs: what the function gets by name.

        Returns:
            What ``collect`` makes of the results; None without it.

        Raises:
            OutOfRetriesError: a chunk ran out of memory at every step that is allowed.
            AdaptiveUsageError: an argument can't be used.
        """
        if self._classes and args and self._is_method_of(tensor):
            self, tensor, args = self._bound(tensor, None), args[0], args[1:]
        wanted = self._dimension if toma_dimension is None else toma_dimension
        dimension = checked_dimension(self._name, tensor, wanted)
        remembered = self._remembered(
            toma_context, toma_cache_type, args, kwargs, (tensor, dimension)
        )
        chunk = Chunk(self._function, tensor, dimension, args, kwargs)
        return self._run(chunk, tensor.shape[dimension], toma_initial_step, remembered)


class ChunkedDecorator(Protocol[T_contra, R_co]):
    """What `chunked` with arguments returns, where results are let go or given to a function."""

    @overload
    def __call__(
        self, func: Callable[Concatenate[Tensor, int, int, P], T_contra], /
    ) -> ChunkedFunction[Concatenate[Tensor, P], R_co]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, Tensor, int, int, P], T_contra], /
    ) -> ChunkedFunction[Concatenate[S, Tensor, P], R_co]: ...


class ChunkedListDecorator(Protocol):
    """What `chunked` with ``collect="list"`` returns."""

    @overload
    def __call__(
        self, func: Callable[Concatenate[Tensor, int, int, P], T], /
    ) -> ChunkedFunction[Concatenate[Tensor, P], list[T]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, Tensor, int, int, P], T], /
    ) -> ChunkedFunction[Concatenate[S, Tensor, P], list[T]]: ...


class ChunkedCatDecorator(Protocol):
    """What `chunked` with ``collect="cat"`` or ``"host"`` returns."""

    @overload
    def __call__(
        self, func: Callable[Concatenate[Tensor, int, int, P], T], /
    ) -> ChunkedFunction[Concatenate[Tensor, P], T]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, Tensor, int, int, P], T], /
    ) -> ChunkedFunction[Concatenate[S, Tensor, P], T]: ...


@overload
def chunked(
    func: Callable[Concatenate[Tensor, int, int, P], object], /
) -> ChunkedFunction[Concatenate[Tensor, P], None]: ...
@overload
def chunked(
    func: Callable[Concatenate[S, Tensor, int, int, P], object], /
) -> ChunkedFunction[Concatenate[S, Tensor, P], None]: ...
@overload
def chunked(
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: None = None,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> ChunkedDecorator[object, None]: ...
@overload
def chunked(
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: Literal["list"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> ChunkedListDecorator: ...
@overload
def chunked(
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: Literal["cat", "host"],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> ChunkedCatDecorator: ...
@overload
def chunked(
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: ReducerT,
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> ChunkedDecorator[object, ReducerT]: ...
@overload
def chunked(
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: Callable[[list[T]], R],
    progress: bool = False,
    **options: Unpack[AdaptiveOptions],
) -> ChunkedDecorator[T, R]: ...
def chunked(
    func: Any = None,
    /,
    *,
    initial_step: int | None = None,
    dimension: int = 0,
    collect: Collect | None = None,
    progress: bool = False,
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
            along ``dimension``; ``"host"``, the same on the host, where each is copied while
            the next is computed; a function of the list; an object with an ``update()`` method,
            such as a metric, which takes each result and is returned; None: the call returns None.
        progress: whether to show a progress bar.
        **options: as of `batch`.

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
    make: Callable[[Any], ChunkedFunction[Any, Any]] = functools.partial(
        ChunkedFunction[Any, Any],
        initial=initial_step,
        options=checked_options("initial_step", **options),
        collect=collect,
        progress=progress,
        dimension=dimension,
    )
    return make if func is None else make(func)


def checked_dimension(name: str, tensor: object, dimension: Any) -> int:
    """The dimension of a tensor to split, from 0 up.

    Raises:
        AdaptiveUsageError: it is no tensor, or has no such dimension, or no views along it.
    """
    if not isinstance(tensor, Tensor):
        raise AdaptiveUsageError(
            f"{name}() got a {type(tensor).__name__} to split, and splits its first argument, a "
            "tensor. Pass one tensor of it first and the others after it, of which the function "
            "takes [start:end]; or use adaptive.range(), which splits numbers."
        )
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    if not (is_strided or tensor.layout is torch.jagged):
        raise AdaptiveUsageError(
            f"{name}() got {describe_tensor(tensor)} of layout {tensor.layout}, of which torch "
            "can't make views of some rows. Use adaptive.range(), and take them in the function."
        )
    n_dimensions = tensor.dim()
    try:
        wanted = index(dimension)
    except TypeError:
        wanted = n_dimensions
    if not -n_dimensions <= wanted < n_dimensions:
        raise AdaptiveUsageError(
            f"{name}() can't split dimension {dimension!r} of a tensor that has {n_dimensions}. "
            "Choose another with dimension= or toma_dimension=."
        )
    wanted %= n_dimensions
    if not is_strided or tensor.is_quantized:
        _check_views(name, tensor, wanted)
    return wanted


def _check_views(name: str, tensor: Tensor, dimension: int) -> None:
    """Make sure that a tensor of an uncommon kind has views along a dimension.

    Raises:
        AdaptiveUsageError: it has none: a jagged one, say, has them along dense dimensions alone.
    """
    n_rows = tensor.shape[dimension]
    try:
        # all rows, because of one row torch makes a view even where it can't be used; a ragged
        # dimension has no plain size, and no views
        tensor.narrow(dimension, 0, n_rows if isinstance(n_rows, int) else 1)
    except (RuntimeError, ValueError) as error:
        raise AdaptiveUsageError(
            f"{name}() got {describe_tensor(tensor)}, of which torch can't make views along "
            f"dimension {dimension}. Choose another with dimension= or toma_dimension=, or use "
            "range(), and take the rows in the function."
        ) from error
