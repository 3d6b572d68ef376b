"""The line profiler: which line of a function took how much memory, and gave it back.

Invariant: profiling changes no result. Nothing is emptied or reset, no tensor is kept alive, and
importing this, or making a profiler, starts nothing.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, TracebackType
from typing import Any, Self, TextIO

import torch

from tenure._callers import line_in
from tenure._errors import ProfilerUsageError
from tenure._text import counted

from ._book import Book, Watch
from ._display import LineRecord, RecordsDisplay, Section, checked_columns
from ._targets import checked_device, chosen_device, function_of, source_of

if sys.version_info >= (3, 12):
    from ._by_monitoring import Monitor as LineEngine
else:
    from ._by_settrace import Tracer as LineEngine

the_engine = LineEngine()
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
        self._watch = Watch(chosen_device(target_gpu, device))
        # by the identity of their code
        self._modules: dict[int, str] = {}
        # A list, because a block may stand inside another of the same profiler.
        self._was_enabled: list[bool] = []
        self._ever_enabled = False
        for function in functions:
            self.add_function(function)

    # --- what is profiled

    @property
    def functions(self) -> tuple[str, ...]:
        """The qualified names of the functions."""
        return tuple(code.co_qualname for code in self._watch.codes.values())

    @property
    def device(self) -> torch.device:
        """The device that is measured; it can be set, also while a profiled function runs."""
        return self._watch.device

    @device.setter
    def device(self, device: str | torch.device) -> None:
        chosen = checked_device(device)
        # What happened up to here is booked to the device that was measured then.
        the_engine.read()
        # on each thread from its next line on
        self._watch.device = chosen

    def add_function(self, function: Callable[..., Any]) -> None:
        """Profile one function more, from its next line on.

        Raises:
            ProfilerUsageError: no Python function runs when it is called.
        """
        found = function_of(function)
        code = found.__code__
        self._modules[id(code)] = found.__module__ or ""
        # A new mapping: other threads look into the old one meanwhile.
        self._watch.codes = {**self._watch.codes, id(code): code}
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
        book = self._book()
        return tuple(each for code in self._watch.codes.values() for each in _records(code, book))

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
        book, chosen = self._book(), self._chosen(func)
        found = [(code, _records(code, book)) for code in chosen]
        records = [each for _, of_code in found for each in of_code]
        sections = [each for code, of_code in found for each in _sections(code, of_code)]
        if not records:
            sections = [Section("", note=self._why_empty(chosen))]
        return RecordsDisplay(tuple(sections), checked_columns(columns, records))

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
                {
                    "function": code.co_qualname,
                    "module": self._modules[i],
                    "file": code.co_filename,
                    "line": code.co_firstlineno,
                }
                for i, code in self._watch.codes.items()
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
        functions = counted(len(self._watch.codes), "function")
        return f"<LineProfiler of {functions} on {self.device}, {state}>"

    def _book(self) -> Book:
        if self.enabled:
            the_engine.read()
        return self._watch.book()

    def _chosen(self, func: Any) -> list[CodeType]:
        """Return the functions that are asked for; of a name all that have it."""
        codes = self._watch.codes
        if func is None:
            return list(codes.values())
        asked: list[Any] = [func]
        if isinstance(func, Iterable) and not isinstance(func, str) and not callable(func):
            asked = list(func)
        chosen: list[CodeType] = []
        for each in asked:
            if isinstance(each, str):
                name = each
                found = [
                    code
                    for i, code in codes.items()
                    if name in {code.co_qualname, f"{self._modules[i]}.{code.co_qualname}"}
                ]
            else:
                code = function_of(each).__code__
                name = code.co_qualname
                found = [code] if id(code) in codes else []
            if not found:
                raise ProfilerUsageError(
                    f"{name} is not profiled; what is: {', '.join(self.functions) or 'none'}. Add "
                    "it with add_function()."
                )
            chosen += found
        return chosen

    def _why_empty(self, chosen: list[CodeType]) -> str:
        if not self._watch.codes:
            return (
                "No lines: there is no function to profile. Pass functions to LineProfiler(), or "
                "add them with add_function()."
            )
        if not self._ever_enabled:
            return "No lines: the profiler was never enabled. Call the functions in a `with` block."
        if not chosen:
            return "No lines: none of the functions was asked for. Without func, all are shown."
        return f"No lines: {', '.join(code.co_qualname for code in chosen)} {_NOT_RUN}"


_NOT_RUN = (
    "did not run while the profiler was enabled. Compiled code has no lines; before Python 3.12, "
    "neither has a thread that was started before."
)


def _records(code: CodeType, book: Book) -> list[LineRecord]:
    """Return a record for each line of a function, device by device."""
    source = dict(enumerate(source_of(code), code.co_firstlineno))
    mine = [(str(device), line, device) for identity, line, device in book if identity == id(code)]
    records = []
    for _, line, device in sorted(mine, key=lambda key: key[:2]):
        figures = book[id(code), line, device]
        record = LineRecord(
            function=code.co_qualname,
            line=line,
            hits=figures.hits,
            device=device,
            source=source.get(line, ""),
            file=code.co_filename,
            allocated_bytes=figures.allocated_bytes,
            freed_bytes=figures.freed_bytes,
            peak_bytes=figures.peak_bytes or 0,
            exact=figures.exact,
            peak_exact=figures.peak_exact,
            shared=figures.shared,
            statistics=dict(figures.statistics),
        )
        records.append(record)
    return records


def _sections(code: CodeType, records: list[LineRecord]) -> list[Section]:
    """Return a section for each device; lines without source, as of a changed file, stand alone."""
    title = f"{code.co_qualname}, {line_in(code.co_filename, code.co_firstlineno)}"
    if not records:
        return [Section(title, note=f"No lines: it {_NOT_RUN}")]
    # A method is indented twice, which costs width and tells nothing.
    source = textwrap.dedent("\n".join(source_of(code)))
    texts = dict(enumerate(source.split("\n"), code.co_firstlineno)) if source else {}
    sections = []
    for device in dict.fromkeys(record.device for record in records):
        by_line = {record.line: record for record in records if record.device == device}
        lines = sorted(texts | by_line)
        rows = tuple((line, texts.get(line, ""), by_line.get(line)) for line in lines)
        sections.append(Section(f"{title}, {device}", rows))
    return sections
