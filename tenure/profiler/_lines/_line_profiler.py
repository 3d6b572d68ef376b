"""The line profiler: which line of a function took how much memory, and gave it back.

Invariant: profiling changes no result. Nothing is emptied or reset, no tensor is kept alive, and
importing this, or making a profiler, starts nothing.
"""

from __future__ import annotations

import atexit
import inspect
import sys
import textwrap
import threading
import tokenize
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from types import CodeType, TracebackType
from typing import Any, Self, TextIO, cast

import torch

from tenure._callers import line_in
from tenure._errors import ProfilerUsageError
from tenure._show import Part, Shown
from tenure._text import counted

from ._book import Book
from ._display import LineRecord, RecordsDisplay, Section, checked_columns
from ._targets import checked_device, chosen_device, function_of

if sys.version_info >= (3, 12):
    from ._by_monitoring import Monitor as LineEngine
else:
    from ._by_settrace import Tracer as LineEngine

the_engine = LineEngine()
"""Where all profilers of a process are enabled. Making it starts nothing."""
# a profiler that nobody disables must not leave a session to the end of the interpreter
atexit.register(the_engine.close_all)


class LineProfiler(Shown):
    """Tells for each line of some functions how much memory it allocated, freed and needed at most.

    The numbers are the allocator's own, so what an operation allocates and frees inside itself is
    among them, whichever function it is called from. Frames are told apart, so recursion,
    generators, coroutines, threads and exceptions come out right. What happens on a line inside
    another profiled function counts there, and not on the calling line; its peak counts on both.

    On Python 3.12 and newer lines come from ``sys.monitoring``, on all threads, beside debuggers
    and coverage. Below that they come from ``sys.settrace``, on the thread that enables the
    profiler and those that start afterwards. Enabling it beside a debugger or coverage raises an
    error there.

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

    _is_spaced = True

    def __init__(
        self,
        *functions: Callable[..., Any],
        target_gpu: int | str | torch.device | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if target_gpu is not None and device is not None:
            raise ProfilerUsageError("target_gpu and device name the same thing. Give one of them.")
        self._book = Book(chosen_device(target_gpu, device))
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
        return tuple(code.co_qualname for code in self._book.codes.values())

    @property
    def device(self) -> torch.device:
        """The device that is measured; it can be set, also while a profiled function runs."""
        return self._book.device

    @device.setter
    def device(self, device: str | torch.device) -> None:
        chosen = checked_device(device)
        # What happened up to here is booked to the device that was measured then.
        the_engine.read()
        if self.enabled:
            self._book.measure(chosen)
        else:
            self._book.device = chosen

    def add_function(self, function: Callable[..., Any]) -> None:
        """Profile one function more, from its next line on.

        Raises:
            ProfilerUsageError: no Python function runs when it is called.
        """
        found = function_of(function)
        code = found.__code__
        self._modules[id(code)] = found.__module__ or ""
        # A new mapping: other threads look into the old one meanwhile.
        self._book.codes = {**self._book.codes, id(code): code}
        if self.enabled:
            the_engine.refresh()

    # --- when

    @property
    def enabled(self) -> bool:
        """Whether it is collecting."""
        return self._book in the_engine.books

    def enable(self) -> None:
        """Begin to collect, beside what was collected before; if it is on, on this thread too."""
        self._ever_enabled = True
        the_engine.open(self._book)

    def disable(self) -> None:
        """Stop collecting; what was collected stays. Does nothing if it is off."""
        the_engine.close(self._book)

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
        self._book.clear()

    # --- what was found

    @property
    def records(self) -> tuple[LineRecord, ...]:
        """A record for each line that ran, function by function, in the order of the lines."""
        return tuple(each for records in self._records().values() for each in records)

    def display(
        self,
        func: Callable[..., Any] | str | Iterable[Callable[..., Any] | str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> RecordsDisplay:
        """Return the records beside their source; print it, or let a notebook show it.

        Args:
            func: the functions to show, themselves or by qualified name; all without it.
            columns: of ``"hits"``, ``"alloc"``, ``"freed"``, ``"net"`` and ``"peak"``.

        Raises:
            ProfilerUsageError: a function is not profiled, or there is no such column.
        """
        chosen, found = self._chosen(func), self._records()
        sections = [each for code in chosen for each in _sections(code, found[id(code)])]
        if not any(found[id(code)] for code in chosen):
            sections = [Section("", note=self._why_empty(chosen))]
        return RecordsDisplay(tuple(sections), checked_columns(columns))

    def print_stats(
        self,
        func: Callable[..., Any] | str | Iterable[Callable[..., Any] | str] | None = None,
        columns: Sequence[str] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Write what ``display`` shows to a stream, ``sys.stdout`` as it is now without one."""
        print(self.display(func, columns), file=stream)

    def _parts(self) -> Sequence[Part]:
        return self.display()._parts()

    def __repr__(self) -> str:
        state = "enabled" if self.enabled else "disabled"
        functions = counted(len(self._book.codes), "function")
        return f"<LineProfiler of {functions} on {self.device}, {state}>"

    def _records(self) -> dict[int, list[LineRecord]]:
        """Return the records of each function, by its code: device by device, line by line."""
        if self.enabled:
            the_engine.read()
        book, here = self._book, threading.get_ident()
        # The session of another thread can't be read from here: more of its lines is to come.
        is_whole = not any(
            frames.visits for number, frames in list(book.frames.items()) if number != here
        )
        codes = book.codes
        sources = {i: _source(code) for i, code in codes.items()}
        found: dict[int, list[LineRecord]] = {i: [] for i in codes}
        for device in sorted(book.lines, key=str):
            # a copy: other threads go on booking
            for (i, line), figures in sorted(book.lines[device].items(), key=itemgetter(0)):
                code = codes[i]
                # in a frame that went on in the midst of a line nothing may have happened
                if figures.hits or figures.allocated_bytes or figures.freed_bytes:
                    record = LineRecord(
                        function=code.co_qualname,
                        line=line,
                        device=device,
                        source=sources[i].get(line, ""),
                        file=code.co_filename,
                        hits=figures.hits,
                        allocated_bytes=figures.allocated_bytes,
                        freed_bytes=figures.freed_bytes,
                        peak_bytes=figures.peak_bytes or 0,
                        exact=figures.exact and is_whole,
                        peak_exact=figures.peak_exact and is_whole,
                    )
                    found[i].append(record)
        return found

    def _chosen(self, func: Any) -> list[CodeType]:
        """Return the functions that are asked for; of a name all that have it."""
        codes = self._book.codes
        if func is None:
            return list(codes.values())
        is_one = isinstance(func, str) or callable(func) or not isinstance(func, Iterable)
        chosen: list[CodeType] = []
        for each in [func] if is_one else cast("Iterable[Any]", func):
            wanted = each if isinstance(each, str) else function_of(each).__code__
            found = [
                code
                for i, code in codes.items()
                if wanted in (code.co_qualname, f"{self._modules[i]}.{code.co_qualname}")
                or wanted is code
            ]
            if not found:
                raise ProfilerUsageError(
                    f"{getattr(wanted, 'co_qualname', wanted)} is not profiled; what is: "
                    f"{', '.join(self.functions) or 'none'}. Add it with add_function()."
                )
            chosen += found
        return chosen

    def _why_empty(self, chosen: list[CodeType]) -> str:
        if not self._book.codes:
            return (
                "No lines: there is no function to profile. Pass functions to LineProfiler(), or "
                "add them with add_function()."
            )
        if not self._ever_enabled:
            return "No lines: the profiler was never enabled. Call the functions in a `with` block."
        if not chosen:
            return "No lines: none of the functions was asked for. Without func, all are shown."
        return f"No lines: {', '.join(code.co_qualname for code in chosen)} {_NOT_RUN}"


# What `exec`, `eval` and `python -c` call the file of whatever they run, if nobody else names it.
_NAMELESS = "<string>"
_NOT_RUN = (
    "did not run while the profiler was enabled. Compiled code has no lines; before Python 3.12, "
    "neither has a thread that was started before."
)


def _sections(code: CodeType, records: list[LineRecord]) -> list[Section]:
    """Return a section for each device; lines without source, as of a changed file, stand alone."""
    title = f"{code.co_qualname}, {line_in(code.co_filename, code.co_firstlineno)}"
    if not records:
        return [Section(title, note=f"No lines: it {_NOT_RUN}")]
    texts = _source(code)
    # A method is indented twice, which costs width and tells nothing.
    texts = dict(zip(texts, textwrap.dedent("\n".join(texts.values())).split("\n"), strict=False))
    sections = []
    for device in dict.fromkeys(record.device for record in records):
        by_line = {record.line: record for record in records if record.device == device}
        lines = sorted(texts | by_line)
        rows = tuple((line, texts.get(line, ""), by_line.get(line)) for line in lines)
        sections.append(Section(f"{title}, {device}", rows))
    return sections


def _source(code: CodeType) -> dict[int, str]:
    """Return the lines of a function by number; none if there is no source, or no longer."""
    # From Python 3.13 on linecache has the text of `python -c` under that name, and would give
    # it for what `exec` made of another text: as in the workers of pytest-xdist.
    if code.co_filename == _NAMELESS:
        return {}
    try:
        lines = inspect.getsourcelines(code)[0]
    # The latter two of a file that was edited since.
    except (OSError, SyntaxError, tokenize.TokenError):
        return {}
    return dict(enumerate([line.rstrip() for line in lines], code.co_firstlineno))
