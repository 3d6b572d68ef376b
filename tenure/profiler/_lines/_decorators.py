"""Decorators that profile a function for as long as the program runs, in one profiler for all.

Nothing starts before the first function is decorated.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import traceback
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, TypeVar, overload

import torch

from tenure._errors import ProfilerUsageError

from ._display import checked_columns
from ._line_profiler import LineProfiler
from ._targets import SUSPENDS, chosen_device, function_of

_F = TypeVar("_F", bound=Callable[..., Any])
# What `profile` has to show at the end, in the order in which it was asked.
_to_print: list[tuple[Any, Sequence[str] | None]] = []


@functools.cache
def _profiler() -> LineProfiler:
    # Made late: it asks for accelerators, which an import must not.
    return LineProfiler()


@overload
def profile(func: _F, columns: Sequence[str] | None = None) -> _F: ...
@overload
def profile(func: None = None, columns: Sequence[str] | None = None) -> Callable[[_F], _F]: ...
def profile(func: Any = None, columns: Sequence[str] | None = None) -> Any:
    """Profile a function from here on, and print its lines when the program ends.

    Args:
        func: the function; it is returned as it is. Without it, a decorator is returned.
        columns: as for ``LineProfiler.display``.

    Raises:
        ProfilerUsageError: no Python function runs when it is called, or there is no such column.

    Source: ``profile`` of pytorch_memlab.
    """
    # A mistake should show here, and not when the program ends.
    checked_columns(columns)
    if func is None:
        return functools.partial(profile, columns=columns)
    profiler = _profiler()
    profiler.add_function(func)
    if not _to_print:
        atexit.register(_print_at_exit)
    _to_print.append((func, columns))
    profiler.enable()
    return func


def profile_every(
    output_interval: int = 1, enable: bool = True, columns: Sequence[str] | None = None
) -> Callable[[_F], _F]:
    """Profile a function from here on, and print its lines after every so many calls.

    It prints the sum, or for peaks the maximum, over all calls up to then.

    Args:
        output_interval: after how many calls to print.
        enable: False to leave the function alone.
        columns: as for ``LineProfiler.display``.

    Raises:
        ProfilerUsageError: the interval is no positive number, or there is no such column; when it
            decorates, that is no plain Python function or method.

    Source: ``profile_every`` of pytorch_memlab.
    """
    # Without brackets the function itself comes here.
    if type(output_interval) is not int or output_interval < 1:
        raise ProfilerUsageError(
            "profile_every() wants a number of calls, at least 1, after which to print. Use it as "
            "@profile_every(10), with brackets."
        )
    checked_columns(columns)

    def decorate(func: Any) -> Any:
        if not enable:
            return func
        # the wrapper of anything else would be another kind of object, or count before it has run
        is_plain = isinstance(func, FunctionType | MethodType)
        if not is_plain or function_of(func).__code__.co_flags & SUSPENDS:
            raise ProfilerUsageError(
                f"profile_every() counts the calls of plain functions and methods, and {func!r} is "
                "none. Decorate the function inside a staticmethod, a property or a module, or use "
                "profile(), which takes generators and coroutines too and prints when the program "
                "ends."
            )
        profiler = _profiler()
        profiler.add_function(func)
        profiler.enable()
        calls = itertools.count(1)

        @functools.wraps(func)
        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                return func(*args, **kwargs)
            finally:
                if next(calls) % output_interval == 0:
                    profiler.print_stats(func, columns)

        return counted

    return decorate


def set_target_gpu(gpu_id: int | str | torch.device) -> None:
    """Measure another accelerator with the decorators; also inside a function that they profile.

    Args:
        gpu_id: its index, or a device.

    Raises:
        ProfilerUsageError: it isn't there.

    Source: ``set_target_gpu`` of pytorch_memlab.
    """
    _profiler().device = chosen_device(gpu_id)


def set_target_device(device: str | torch.device) -> None:
    """Measure another device with the decorators; also inside a function that they profile.

    Args:
        device: as torch spells it, ``"cpu"`` or ``"cuda:1"``.

    Raises:
        ProfilerUsageError: it isn't there, or can't be measured.
    """
    _profiler().device = device


def clear_global_line_profiler() -> None:
    """Forget what the decorators have collected; decorated functions are still profiled.

    Source: ``clear_global_line_profiler`` of pytorch_memlab.
    """
    _profiler().clear()


def _print_at_exit() -> None:
    idle = []
    for func, columns in _to_print:
        try:
            shown = _profiler().display(func, columns)
            if shown.records:
                print(shown)
            else:
                idle.append(func)
        # The other tables must come all the same.
        except Exception:
            traceback.print_exc()
    if idle:
        _profiler().print_stats(idle)
