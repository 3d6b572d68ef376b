"""All that is measured of one run, begun and ended together.

Each option of ``tenure run`` is a generator: it begins to measure, waits for the end of the program
and its error, ends, waits until all have ended, and returns fields of the recording.

Invariant: whatever happens in here, what runs goes on, and ends as it would; what went wrong is a
note in the recording.
"""

from __future__ import annotations

import dis
import os
import platform
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any

import tenure
from tenure._visible import visible

from ._ends import End

if TYPE_CHECKING:
    from tenure.profiler import MemReport, Recording, Snapshot
    from tenure.scopes import LeakReport

    from ._cell import CellLines
    from ._lines import Lines

Found = Generator[None, BaseException | None, dict[str, Any]]
MAIN = "__main__"
_MOST_ROWS, _MOST_REPORTS = 2000, 100
_OF_ONE_THREAD = {"--budget", "--timeline", "--on-oom"}
"""These see, and end on, the thread alone on which they have begun."""
# what is left of `main()`, and of `sys.exit(main())`
_OPS = frozenset({"POP_TOP", "PRECALL", "CALL", "LOAD_CONST", "LOAD_SMALL_INT", "NOP"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST"})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be measured.

    Attributes:
        budget_bytes: what the program can hold, or None.
        leaks: whether to look for what grows.
        lines: functions whose lines are measured.
        timeline: whether to record live bytes over time.
        on_oom: whether to explain an out-of-memory error that nothing handles.
        handled_oom: whether to explain one that the program handles, too.
    """

    budget_bytes: int | None = None
    leaks: bool = False
    lines: list[str] = field(default_factory=list)
    timeline: bool = False
    on_oom: bool = False
    handled_oom: bool = False


class Measuring:
    """Everything that is measured of one run.

    Args:
        wanted: the options.
        lines: it measures lines, and knows what runs; or None.

    Attributes:
        at_end: what was alive at the end, once it has ended; None if that could not be told.
    """

    def __init__(self, wanted: Wanted, lines: Lines | CellLines | None) -> None:
        self.at_end: Snapshot | None = None
        self._notes: list[str] = []
        self._found: dict[str, Any] = {"peaks": {}, "seeks_leaks": False}
        # In the order in which they begin: what begins first ends last.
        self._running: dict[str, Found] = {}
        if lines is not None:
            # it tries the allocator out, which is none of what the program takes
            self._running["--lines"] = lines.measured(self._notes)
        if wanted.budget_bytes is not None:
            # below those that see what it refuses
            self._running["--budget"] = _budget(wanted.budget_bytes)
        if wanted.timeline:
            self._running["--timeline"] = self._timeline()
        if wanted.on_oom:
            self._running["--on-oom"] = _oom(sees_handled=wanted.handled_oom)
        # what frames of an error hold is looked at before the others end
        self._running["at the end"] = self._heap(seeks_growth=wanted.leaks)

    def begin(self) -> None:
        """Measure from now on."""
        if threading.current_thread() is not threading.main_thread():
            bound = [option for option in self._running if option in _OF_ONE_THREAD]
            for option in bound:
                del self._running[option]
            if bound:
                told = f"{', '.join(bound)} left out: torch was imported on another thread than "
                self._notes.append(f"{told}the main one")
                say(f"tenure run: {self._notes[-1]}. Import it in the program itself.")
        for option in list(self._running):
            if note := self._go_on(option, None):
                say(f"tenure run: {note}")

    def end(self, error: BaseException | None) -> None:
        """Measure no more."""
        for option in reversed(list(self._running)):
            self._go_on(option, error)

    def abandon(self) -> None:
        """Stand aside in a child, which runs plainly."""
        for option in reversed(self._running):
            with suppress(Exception):
                self._running[option].close()

    def recording(self, facts: dict[str, Any], notes: list[str]) -> Recording:
        """Return the recording of these facts, as `facts_of` gives them, and of what was found."""
        import torch

        from tenure.profiler import Recording

        for option in list(self._running):
            self._go_on(option, None)
        facts["versions"]["torch"] = str(torch.__version__)
        all_notes = tuple(dict.fromkeys([*notes, *self._notes]))
        return Recording(**facts, **self._found, notes=all_notes)

    def _go_on(self, option: str, error: BaseException | None) -> str:
        """Let one go on to where it waits next; a failure is a note, which is returned."""
        try:
            self._running[option].send(error)
        except StopIteration as done:
            del self._running[option]
            found = done.value
            for device, n_bytes in found.pop("peaks", {}).items():
                # of two that count the one that sees more
                peaks = self._found["peaks"]
                peaks[device] = max(n_bytes, peaks.get(device, 0))
            self._found.update(found)
        # a measurement that fails must not become an error of the program
        except Exception as failure:
            self._running.pop(option, None)
            note = f"{option}: {type(failure).__name__}: {' '.join(str(failure).split())}"
            self._notes.append(note)
            return note
        return ""

    def _timeline(self) -> Found:
        """``--timeline``: live bytes over time."""
        from tenure.profiler import Timeline

        with Timeline() as timeline:
            yield
        yield
        report = timeline.report
        self._notes += [f"--timeline: {note}" for note in report.notes]
        peaks = {device.device: device.peak_bytes for device in report.devices}
        return {"timeline": report, "peaks": peaks}

    def _heap(self, *, seeks_growth: bool) -> Found:
        """What was alive at the end; and what grew, and outlived scopes that report."""
        from tenure._registries import leak_watchers
        from tenure.profiler import GrowthWatch, snapshot

        watch = GrowthWatch()
        reports: list[LeakReport] = []
        n_reports = 0
        last: FrameType | None = None

        def note_report(report: LeakReport) -> None:
            nonlocal n_reports
            n_reports += 1
            if n_reports <= _MOST_REPORTS:
                reports.append(report)

        def note_last_function() -> None:
            nonlocal last
            last = _last_function(sys._getframe())

        with ExitStack() as stack:
            if seeks_growth:
                leak_watchers.append(note_report)
                stack.callback(leak_watchers.remove, note_report)
                watch._before_look = note_last_function
                stack.enter_context(watch)
            error = yield
            try:
                with _variables_of(error, last):
                    self.at_end = snapshot()
            except MemoryError:
                told = "what was alive at the end could not be told: too little memory was left"
                self._notes.append(told)
        last = None
        found: dict[str, Any] = {"peaks": _peaks()}
        if self.at_end is not None:
            found["memory"] = self._cut(self.at_end.report)
        if seeks_growth:
            found["seeks_leaks"], found["growth"] = True, watch.growth(at_end=self.at_end)
            found |= watch._looks_told(with_end=self.at_end is not None)
        yield
        self._notes += [f"--leaks: {note}" for note in watch.notes]
        if more := n_reports - len(reports):
            told = f"--leaks: {more} more scopes reported leaks, which are left out"
            self._notes.append(told)
        return {**found, "leaks": tuple(reports)}

    def _cut(self, report: MemReport) -> MemReport:
        """Bounded: a process that is full of small tensors has to write this, too."""
        devices = []
        for device in report.devices:
            rows = sorted(device.rows, key=lambda row: -row.counted_bytes)[:_MOST_ROWS]
            if len(rows) < len(device.rows):
                told = f"of {len(device.rows)} tensors on {device.device} at the end, the "
                self._notes.append(f"{told}{_MOST_ROWS} largest are listed")
            devices.append(replace(device, rows=tuple(rows)))
        return replace(report, devices=tuple(devices))


def _budget(n_bytes: int) -> Found:
    """``--budget``: the program can hold only so much."""
    import torch

    from tenure.adaptive import memory_budget

    device = torch.accelerator.current_accelerator(check_available=True)
    budget = memory_budget(n_bytes, "cpu" if device is None else device)
    budget.__enter__()
    try:
        yield
    finally:
        # whatever else the program left open is no error of it
        with suppress(Exception):
            budget.__exit__(None, None, None)
    yield
    return {"peaks": {str(budget.device): budget.peak_bytes}}


def _oom(*, sees_handled: bool) -> Found:
    """An out-of-memory error, explained.

    Args:
        sees_handled: whether errors are seen as they are raised, which costs each call of torch.
    """
    from tenure.profiler import record_oom

    recorder = record_oom()
    if not sees_handled:
        recorder._watch.set_aside()
    error: BaseException | None = None
    try:
        error = yield
    finally:
        kind, frames = (type(error), error.__traceback__) if error else (None, None)
        recorder.__exit__(kind, error, frames)
    # they are not to be kept
    del error, frames
    yield
    return {} if recorder.report is None else {"oom": recorder.report}


def _peaks() -> dict[str, int]:
    """Return the most that the allocator of each accelerator had in use, if the program used it."""
    import torch

    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    # asking would set it up, and not every backend counts
    if device is None or not getattr(module, "is_initialized", bool)():
        return {}
    most = [int(module.max_memory_allocated(i)) for i in range(module.device_count())]
    return {f"{device.type}:{i}": n_bytes for i, n_bytes in enumerate(most) if n_bytes}


@contextmanager
def _variables_of(error: BaseException | None, last: FrameType | None) -> Iterator[None]:
    """Name the variables of functions that the program has ended in, in a block."""
    from tenure._registries import ended_frames

    frames = [each for each, _ in walk_tb(None if error is None else error.__traceback__)]
    # what runs still has variables by itself
    running = {each for each, _ in walk_stack(sys._getframe())}
    ended = dict.fromkeys(frames if last is None else [*frames, last])
    ended_frames.extend(each for each in ended if each not in running)
    try:
        yield
    finally:
        ended_frames.clear()


def _last_function(frame: FrameType | None) -> FrameType | None:
    """Return the frame that the last statement of ``__main__`` has called, as of `main()`.

    Its variables are still there at the end if its frame is held meanwhile, which changes nothing
    of the program: nothing of it runs after that function, but for an exit.
    """
    space = getattr(sys.modules.get(MAIN), "__dict__", None)
    while frame is not None and (caller := frame.f_back) is not None:
        if caller.f_globals is space and caller.f_code.co_name == "<module>":
            for each in dis.get_instructions(caller.f_code):
                if each.offset > caller.f_lasti and each.opname not in _OPS:
                    return frame if each.opname in _ENDS else None
        frame = caller
    return None


def children_in_words(n_forked: int) -> list[str]:
    """Return notes on processes that a program has started, such as workers of a loader.

    Args:
        n_forked: how often this process was forked.
    """
    # what multiprocessing has made, which may start them in another way
    counter = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
    n_made = int(repr(counter)[len("count(") : -1]) - 1 if counter is not None else 0
    n_children = max(n_forked, n_made)
    if not n_children:
        return []
    told = "1 child process was" if n_children == 1 else f"{n_children} child processes were"
    with suppress(ImportError):  # on Windows
        import resource

        import psutil

        from tenure._text import format_bytes

        unit = 1 if sys.platform == "darwin" else 1024
        # that counts those alone that have been waited for
        most_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                most_bytes = max(most_bytes, child.memory_info().rss)
        if most_bytes:
            most = format_bytes(most_bytes)
            return [f"{told} not recorded; the largest took {most} of RAM at most"]
    return [f"{told} not recorded"]


def facts_of(
    command: tuple[str, ...], began_at: str, duration_s: float, end: End
) -> dict[str, Any]:
    """The fields of a recording that nothing has measured.

    Args:
        command: what was run.
        began_at: when, as ISO 8601 in UTC.
        duration_s: how long it ran.
        end: how it ended.
    """
    return {
        "command": command,
        "began_at": began_at,
        "duration_s": duration_s,
        "ended": end.text,
        "exit_code": end.exit_code,
        "versions": {"python": platform.python_version(), "tenure": tenure.__version__},
        "rank": rank_of_environment(),
    }


def rank_of_environment() -> int | None:
    """The rank of this process, as torchrun and others tell it."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def say(line: str) -> None:
    """Say it on the standard error; nothing is said if there is none."""
    # print() would write to the standard output
    if sys.stderr is None:
        return
    # it may be closed, or a pipe that nobody reads
    with suppress(Exception):
        print(visible(line), file=sys.stderr, flush=True)
