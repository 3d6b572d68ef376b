"""The line profiler: which line of a function took how much memory, and gave it back.

Invariant: profiling changes no result. Nothing is emptied or reset, no tensor is kept alive, and
importing this, or making a profiler, starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TextIO

import torch

from tenure._errors import ProfilerUsageError
from tenure._text import counted

from ._book import Book, Figures, Watch
from ._display import LineRecord, RecordsDisplay, Section, columns_named, section_of, title_of
from ._engine import Engine
from ._targets import Function, checked_device, default_device, device_of_gpu, function_of

if sys.version_info >= (3, 12):
    from ._by_monitoring import Monitor as LineSource
else:
    from ._by_settrace import Tracer as LineSource

the_engine = Engine(LineSource)
"""Where all profilers of a process are enabled. Making it starts nothing."""


class LineProfiler:
    """Tells for each line of some functions how much memory it allocated, freed and needed at most.

    The numbers are the allocator's own, so what an operation allocates and frees inside itself is
    among them, whichever function it is called from. Frames are told apart, so recursion,
    generators, coroutines, threads and exceptions come out right. What happens on a line inside
    another profiled function counts there, and not on the calling line; its peak counts on both.

    On Python 3.12 and newer lines come from ``sys.monitoring``, on all threads. Below that they
    come from ``sys.settrace``, on the thread that enables the profiler and those that start
    afterwards; debuggers and coverage go on.

    Args:
        *functions: what to profile: functions, methods, partials or wrappers of them, modules.
        target_gpu: the accelerator's index, or a device.
        device: the device whose memory is measured; without either, the first accelerator, or the
            CPU where there is none.

    Raises:
        ProfilerUsageError: something has no lines, or the device can't be measured.

    Example:
        >>> import torch
        >>> from tenure.profiler import LineProfiler
        >>> def work():
        ...     x = torch.ones(256)
        ...     return torch.cat([x, x]).sum()
        >>> with LineProfiler(work, device="cpu") as profiler:
        ...     total = work()
        >>> for r in profiler.records:
        ...     print(r.line, r.hits, r.allocated_bytes, r.freed_bytes, r.net_bytes, r.peak_bytes)
        2 1 1024 0 1024 1024
        3 1 2052 3072 -1020 3076

    Source: ``LineProfiler`` of pytorch_memlab.
    """

    def __init__(
        self,
        *functions: Callable[..., Any],
        target_gpu: int | str | torch.device | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if target_gpu is not None and device is not None:
            raise ProfilerUsageError("target_gpu and device name the same thing. Give one of them.")
        self._functions: dict[int, Function] = {}
        self._watch = Watch(_chosen_device(target_gpu, device))
        # A list, because a block may stand inside another of the same profiler.
        self._was_enabled: list[bool] = []
        self._ever_enabled = False
        for function in functions:
            self.add_function(function)

    # --- what is profiled

    @property
    def functions(self) -> tuple[str, ...]:
        """The qualified names of the functions."""
        return tuple(function.name for function in self._functions.values())

    @property
    def device(self) -> torch.device:
        """The device that is measured; it can be set, also while a profiled function runs."""
        return self._watch.target.device

    @device.setter
    def device(self, device: str | torch.device) -> None:
        chosen = checked_device(device)
        # What happened up to here is booked to the device that was measured then.
        the_engine.read()
        # on each thread from its next line on
        self._watch.target.device = chosen

    def add_function(self, function: Callable[..., Any]) -> None:
        """Profile one function more, from its next line on.

        Raises:
            ProfilerUsageError: no Python function runs when it is called.
        """
        found = function_of(function)
        self._functions.setdefault(id(found.code), found)
        # A new mapping: other threads look into the old one meanwhile.
        self._watch.codes = {i: function.code for i, function in self._functions.items()}
        if self.enabled:
            the_engine.refresh()

    # --- when

    @property
    def enabled(self) -> bool:
        """Whether it is collecting."""
        return self._watch in the_engine.watches

    def enable(self) -> None:
        """Begin to collect, beside what was collected before; if it is on, on this thread too."""
        self._ever_enabled = True
        the_engine.open(self._watch)

    def disable(self) -> None:
        """Stop collecting; what was collected stays. Does nothing if it is off."""
        the_engine.close(self._watch)

    def __enter__(self) -> Self:
        """Enable it for a block."""
        self._was_enabled.append(self.enabled)
        self.enable()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave it as it was before the block; an exception goes on."""
        if not self._was_enabled.pop():
            self.disable()

    def clear(self) -> None:
        """Forget what was collected; the functions stay, and an enabled profiler stays on."""
        if self.enabled:
            the_engine.read()
        for booking in self._watch.bookings:
            booking.clear()

    # --- what was found

    @property
    def records(self) -> tuple[LineRecord, ...]:
        """A record for each line that ran, function by function, in the order of the lines."""
        lines = self._lines()
        return tuple(
            record
            for function in self._functions.values()
            for records in _records_by_device(function, lines).values()
            for record in records
        )

    def display(
        self,
        func: Callable[..., Any] | str | Iterable[Callable[..., Any] | str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> RecordsDisplay:
        """What was found, with the source; print it, or let a notebook show it.

        Args:
            func: the functions to show, themselves or by qualified name; all without it.
            columns: of ``"hits"``, ``"alloc"``, ``"freed"``, ``"net"``, ``"peak"`` and the fields
                of the device's ``memory_stats()``, such as ``"active_bytes.all.peak"``.

        Raises:
            ProfilerUsageError: a function is not profiled, or there is no such column.
        """
        lines, sections = self._lines(), list[Section]()
        for function in self._chosen(func):
            sections += _sections(function, _records_by_device(function, lines))
        if all(section.note for section in sections):
            sections = [Section("", note=self._why_empty(func))]
        records = [r for section in sections for _, _, r in section.rows if r is not None]
        return RecordsDisplay(sections, columns_named(columns, records))

    def print_stats(
        self,
        func: Callable[..., Any] | str | Iterable[Callable[..., Any] | str] | None = None,
        columns: Sequence[str] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Write what ``display`` shows to a stream, ``sys.stdout`` as it is now without one."""
        print(self.display(func, columns), file=sys.stdout if stream is None else stream)

    def to_dict(self) -> dict[str, Any]:
        """What was found, as values that JSON has: the functions, and a dict for each record."""
        return {
            "functions": [
                {"function": f.name, "module": f.module, "file": f.file, "line": f.first_line}
                for f in self._functions.values()
            ],
            "records": [record.to_dict() for record in self.records],
        }

    def __str__(self) -> str:
        return str(self.display())

    def __rich__(self) -> RecordsDisplay:
        return self.display()

    def _repr_html_(self) -> str:
        return self.display()._repr_html_()

    def __repr__(self) -> str:
        state = "enabled" if self.enabled else "disabled"
        functions = counted(len(self._functions), "function")
        return f"<LineProfiler of {functions} on {self.device}, {state}>"

    def _lines(self) -> Book:
        if self.enabled:
            the_engine.read()
        return self._watch.book()

    def _chosen(self, func: Any) -> list[Function]:
        """The functions asked for; those of a name are all that have it."""
        if func is None:
            return list(self._functions.values())
        asked: list[Any] = [func]
        if isinstance(func, Iterable) and not isinstance(func, str) and not callable(func):
            asked = list(func)
        return [function for one in asked for function in self._named(one)]

    def _named(self, asked: Any) -> list[Function]:
        if isinstance(asked, str):
            known = self._functions.values()
            found = [f for f in known if asked in {f.name, f"{f.module}.{f.name}"}]
        else:
            known_as = id(function_of(asked).code)
            found = [self._functions[known_as]] if known_as in self._functions else []
        if not found:
            name = asked if isinstance(asked, str) else function_of(asked).name
            profiled = ", ".join(self.functions) or "none"
            raise ProfilerUsageError(
                f"{name} is not profiled; what is: {profiled}. Add it with add_function()."
            )
        return found

    def _why_empty(self, func: Any) -> str:
        if not self._functions:
            return (
                "No lines: there is no function to profile. Pass functions to LineProfiler(), or "
                "add them with add_function()."
            )
        if not self._ever_enabled:
            return "No lines: the profiler was never enabled. Call the functions in a `with` block."
        names = ", ".join(function.name for function in self._chosen(func))
        if not names:
            return "No lines: none of the functions was asked for. Without func, all are shown."
        return f"No lines: {names} {_NOT_RUN}"


_NOT_RUN = (
    "did not run while the profiler was enabled. Compiled code has no lines; before Python 3.12, "
    "neither has a thread that was started before."
)


def _chosen_device(
    target_gpu: int | str | torch.device | None, device: str | torch.device | None
) -> torch.device:
    if device is not None:
        return checked_device(device)
    return default_device() if target_gpu is None else device_of_gpu(target_gpu)


def _records_by_device(function: Function, lines: Book) -> dict[torch.device, list[LineRecord]]:
    source = dict(enumerate(function.source(), function.first_line))
    found: dict[torch.device, list[LineRecord]] = {}
    mine = [(line, device) for code, line, device in lines if code == id(function.code)]
    for line, device in sorted(mine, key=lambda key: key[0]):
        figures = lines[id(function.code), line, device]
        record = _record(function, line, device, figures, source.get(line, ""))
        found.setdefault(device, []).append(record)
    return found


def _record(
    function: Function, line: int, device: torch.device, figures: Figures, source: str
) -> LineRecord:
    return LineRecord(
        function=function.name,
        line=line,
        hits=figures.hits,
        device=device,
        source=source,
        file=function.file,
        allocated_bytes=figures.allocated_bytes,
        freed_bytes=figures.freed_bytes,
        peak_bytes=figures.peak_bytes or 0,
        exact=figures.exact,
        peak_exact=figures.peak_exact,
        shared=figures.shared,
        statistics=dict(figures.statistics),
    )


def _sections(function: Function, records: dict[torch.device, list[LineRecord]]) -> list[Section]:
    place = function.name, function.file, function.first_line
    if not records:
        return [Section(title_of(*place), note=f"No lines: it {_NOT_RUN}")]
    source = function.source()
    return [section_of(*place, source, of_device) for of_device in records.values()]
