"""One call of a function of a size, a range or a tensor, and functions whose calls are run so.

Invariant: a decorated function is a plain one, which binds, and is copied and pickled, as every
function is. Objects and bound methods become a ``functools.partial``, which is copied and pickled
with what it calls.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from operator import index
from types import FrameType, FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor

from tenure._callers import user_frame
from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.compiler import never_compiled

from .._callables import check_function, name_of
from .._sizes import CacheType, RememberedCall, checked_initial, stands_for
from ._options import Options
from ._run import DimensionPart, RangePart, run_batch, run_pieces

_Function = Callable[..., Any]


class _Owner:
    """The key of the sizes of a decorated object; it does not keep the object alive."""

    def __init__(self, function: _Function) -> None:
        self.__module__ = getattr(function, "__module__", "")
        self.__qualname__ = getattr(function, "__qualname__", "")

    def __deepcopy__(self, memo: object) -> Self:
        # copies in a process share their sizes
        return self


def decorated(call: _Function, options: Options, function: Any) -> Any:
    """Return a function that runs ``function`` as ``call`` does.

    Raises:
        AdaptiveUsageError: it is no function, or it can be suspended.
    """
    if isinstance(function, classmethod | staticmethod):
        return type(function)(decorated(call, options, function.__func__))
    if isinstance(function, int):
        initial = "initial_batchsize" if call is call_batch else "initial_step"
        raise AdaptiveUsageError(
            f"{_entry(call)} wants a function, and got {function!r}. For a size to begin with, "
            f"write {_entry(call)}({initial}={function!r})."
        )
    check_function(_entry(call), function)
    if not isinstance(function, FunctionType):
        options = dataclasses.replace(options, owner=_Owner(function))
        return functools.update_wrapper(functools.partial(call, options, function), function)
    # what is defined in another function is new in each call of that, and knows the size
    options = dataclasses.replace(options, owner=stands_for(function))
    code = inspect.unwrap(function).__code__
    is_method = code.co_varnames[: min(code.co_argcount, 1)] in (("self",), ("cls",))

    @functools.wraps(function)
    @never_compiled
    def adaptive(*args: Any, **kwargs: Any) -> Any:
        if args and (is_method or _has_method(args[0], function)):
            return call(options, MethodType(function, args[0]), *args[1:], **kwargs)
        return call(options, function, *args, **kwargs)

    if _is_named_in_body(user_frame(sys._getframe()), function):
        # Pickle finds a bound method by its name, which must not be that of the undecorated one.
        adaptive.__name__ += " (decorated)"
    return adaptive


def _is_named_in_body(frame: FrameType, function: _Function) -> bool:
    """Tell whether a frame is the body of a class that has a function under the function's name."""
    # Not of a function: to read its f_locals would keep alive what it deletes.
    return (
        not frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and "__qualname__" in frame.f_locals
        and frame.f_locals.get(function.__name__) is function
    )


def _entry(call: _Function) -> str:
    return f"@tenure.adaptive.{call.__name__.removeprefix('call_')}"


def _has_method(instance: object, function: _Function) -> bool:
    """Tell whether the class of an object has a function, decorated, as a method."""
    # A method's first parameter may have another name than self, or be one of *args of a wrapper.
    return not isinstance(instance, int | Tensor) and any(
        type(value) is FunctionType and vars(value).get("__wrapped__") is function
        for kind in type(instance).__mro__
        # a module's class inherits hundreds of attributes
        if not kind.__module__.startswith(("torch.", "builtins"))
        for value in vars(kind).values()
    )


@never_compiled
def call_batch(
    options: Options,
    function: _Function,
    /,
    *args: Any,
    toma_initial_batchsize: int | None = None,
    toma_context: Any = None,
    toma_cache_type: CacheType | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function with the largest batch size that fits and is known to."""
    name = name_of(function)
    initial = _initial(options, "toma_initial_batchsize", toma_initial_batchsize)
    if initial is None:
        raise AdaptiveUsageError(
            f"{name}() has no batch size to begin with. Give initial_batchsize=, "
            "maximum=, or toma_initial_batchsize= in the call."
        )
    remembered = _remembered(options, toma_context, toma_cache_type, function, args, kwargs)
    try:
        return run_batch(
            name,
            function,
            initial,
            args=args,
            kwargs=kwargs,
            options=options,
            remembered=remembered,
        )
    # Users of toma and accelerate know functions that are called with a size: the error of the
    # function, which counts one argument too many, says why.
    except TypeError as error:
        if _got_a_size(function, args, kwargs):
            error.add_note(
                f"{name}() gets its batch size from tenure, before what it is called "
                f"with. Call it without one: leave {args[0]!r} out."
            )
        raise


def _got_a_size(function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a function can be called only without the first number that it got."""
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


@never_compiled
def call_range(
    options: Options,
    function: _Function,
    /,
    start: Any = None,
    end: Any = None,
    *args: Any,
    toma_initial_step: int | None = None,
    toma_context: Any = None,
    toma_cache_type: CacheType | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function with one piece of a range after the other."""
    name = name_of(function)
    try:
        start, end = index(start), index(end)
    except TypeError:
        raise AdaptiveUsageError(
            f"{name}() got the range {start!r} to {end!r}. Its first two arguments are the first "
            "number and the one after the last, as ints."
        ) from None
    return run_pieces(
        name,
        RangePart(function, start, args, kwargs),
        end,
        initial=_initial(options, "toma_initial_step", toma_initial_step),
        options=options,
        remembered=_remembered(options, toma_context, toma_cache_type, function, args, kwargs),
    )


@never_compiled
def call_chunked(
    options: Options,
    function: _Function,
    # none where it was passed by name, which is refused; its own name is the function's to use
    tensor: Any = None,
    /,
    *args: Any,
    toma_initial_step: int | None = None,
    toma_dimension: int | None = None,
    toma_context: Any = None,
    toma_cache_type: CacheType | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function with one chunk of a tensor after the other."""
    name = name_of(function)
    wanted = options.dimension if toma_dimension is None else toma_dimension
    dimension = _checked_dimension(name, tensor, wanted)
    split = tensor, dimension
    return run_pieces(
        name,
        DimensionPart(function, tensor, dimension, args, kwargs),
        tensor.shape[dimension],
        initial=_initial(options, "toma_initial_step", toma_initial_step),
        options=options,
        remembered=_remembered(
            options, toma_context, toma_cache_type, function, args, kwargs, split
        ),
    )


def _initial(options: Options, name: str, initial: int | None) -> int | None:
    return options.initial if initial is None else checked_initial(name, initial, options.limits)


def _remembered(
    options: Options,
    context: Any,
    cache_type: CacheType | None,
    function: _Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split: tuple[Tensor, int] | None = None,
) -> RememberedCall:
    return RememberedCall(
        options.owner,
        user_frame(sys._getframe()),
        options.context if context is None else context,
        cache_type or options.cache_type,
        args,
        kwargs,
        function=function,
        split=split,
    )


def _checked_dimension(name: str, tensor: object, dimension: Any) -> int:
    """Return the dimension of a tensor to split, from 0 up.

    Raises:
        AdaptiveUsageError: it is no dense tensor, or has no such dimension.
    """
    if not isinstance(tensor, Tensor):
        raise AdaptiveUsageError(
            f"{name}() got a {type(tensor).__name__} to split, and splits its first argument, a "
            "tensor. Pass one tensor of it first and the others after it, of which the function "
            "takes [start:end]; or use adaptive.range(), which splits numbers."
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise AdaptiveUsageError(
            f"{name}() got {describe_tensor(tensor)} of layout {tensor.layout}, and splits dense "
            "tensors. Use adaptive.range(), and take the rows in the function."
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
    return wanted % n_dimensions
