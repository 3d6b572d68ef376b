"""Making way for the program's own profilers, which refuse to start beside another.

While ``announce`` is in force the functions with which torch.profiler begins are wrapped where it
looks them up; what they do is unchanged, and the wrapper's only act is to call a function before.
"""

from __future__ import annotations

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
    # torch calls none that it has dropped: its own profiler then refuses to begin, and says so
    there = [(module, name) for module, name in _BEGINNINGS if hasattr(module, name)]
    wrappers = [_Announcing(module, name, make_way) for module, name in there]

    def stop() -> None:
        for wrapper in wrappers:
            wrapper.stop()

    return stop


class _Announcing:
    """A function of a module, and what to call before it."""

    def __init__(self, module: ModuleType, name: str, make_way: Callable[[], None]) -> None:
        self._place = module, name
        self._original: Any = getattr(module, name)
        self._make_way: Callable[[], None] | None = make_way
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._make_way is not None:
            self._make_way()
        return self._original(*args, **kwargs)

    def stop(self) -> None:
        """Put the function back; if someone has wrapped this meanwhile, just call it."""
        self._make_way = None
        module, name = self._place
        if getattr(module, name) is self:
            setattr(module, name, self._original)


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
