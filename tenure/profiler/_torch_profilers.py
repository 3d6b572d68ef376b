"""Making way for the program's own profilers, which refuse to start beside another.

While ``announce`` is in force the functions with which torch.profiler begins are wrapped where it
looks them up; what they do is unchanged, and the wrapper's only act is to call a function before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.autograd import profiler, profiler_legacy

_BEGINNINGS: tuple[tuple[ModuleType, str], ...] = (
    (profiler, "_prepare_profiler"),
    (profiler, "_enable_profiler"),
    (profiler_legacy, "_enable_profiler_legacy"),
)


def announce(make_way: Callable[[], None]) -> Callable[[], None]:
    """Call ``make_way`` on its thread before a profiler begins; returns what puts an end to it."""
    wrapped = [(module, name, *_wrap(module, name, make_way)) for module, name in _BEGINNINGS]

    def stop() -> None:
        for module, name, original, wrapper in wrapped:
            wrapper.make_way = _nothing  # someone may have wrapped the wrapper
            if getattr(module, name) is wrapper:
                setattr(module, name, original)

    return stop


def _wrap(module: ModuleType, name: str, make_way: Callable[[], None]) -> tuple[Any, Any]:
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper.make_way()  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    wrapper.make_way = make_way  # type: ignore[attr-defined]
    setattr(module, name, wrapper)
    return original, wrapper


def _nothing() -> None:
    pass


def works() -> bool:
    """Whether a profiler of the program announces itself, and leaves torch as it was."""
    before = [getattr(module, name) for module, name in _BEGINNINGS]
    calls: list[int] = []
    stop = announce(lambda: calls.append(1))
    try:
        with profiler_legacy.profile():
            pass
        functions = profiler.profile.__dict__
        uses = [functions[f].__code__.co_names for f in ("_prepare_trace", "_start_trace")]
    finally:
        stop()
    known = "_prepare_profiler" in uses[0] and "_enable_profiler" in uses[1]
    return known and bool(calls) and before == [getattr(m, n) for m, n in _BEGINNINGS]
