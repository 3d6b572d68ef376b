"""All that is measured of one run, begun and ended together.

Invariant: whatever happens in here, what runs goes on, and ends as it would; what went wrong is a
note in the recording.
"""

from __future__ import annotations

import argparse
import dis
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any

import tenure
from tenure._visible import visible

from ._ends import End
from ._main_module import MAIN

if TYPE_CHECKING:
    from tenure.profiler import MemReport, Recording, Snapshot, Timeline
    from tenure.scopes import LeakReport

_MOST_ROWS, _MOST_REPORTS = 2000, 100
# what is left of `main()`, and of `sys.exit(main())`
_OPS = frozenset({"POP_TOP", "PRECALL", "CALL", "LOAD_CONST", "LOAD_SMALL_INT", "NOP"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_HANDLED = (
    "--on-oom: the program has handled an out-of-memory error. Run it with --on-oom to see the "
    "cause."
)
_Read = Callable[[Any], dict[str, Any]]
"""Returns fields of a recording, once all options have ended."""


class Measuring:
    """Everything that is measured of one run, whose clock runs from here on.

    Args:
        command: the command that is run.
        wanted: the options of the verb or the magic.
        lines: the functions whose lines are measured; or None. ``lines.profiler()`` measures them,
            and ``lines.found(profiler)`` returns fields of the recording.

    Attributes:
        has_begun: whether it measures, or has measured.
        has_ended: whether the run has ended.
        at_end: what was alive at the end, once it has ended; None if that could not be told.
    """

    def __init__(self, command: tuple[str, ...], wanted: argparse.Namespace, lines: Any) -> None:
        self.has_begun = self.has_ended = False
        self.at_end: Snapshot | None = None
        self._command, self._wanted, self._lines = command, wanted, lines
        self._began_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._began, self._duration_s = perf_counter(), 0.0
        self._notes: list[str] = []
        # By option, in the order in which they begin: the first that begins is the last that ends.
        self._open: dict[str, tuple[Any, _Read]] = {}
        self._ended: dict[str, tuple[Any, _Read]] = {}
        self._reports: list[LeakReport] = []
        self._n_reports = self._n_refused = self._n_retried = 0
        self._last: FrameType | None = None

    def begin(self) -> None:
        """Measure from now on, unless the run has ended."""
        if self.has_begun or self.has_ended:
            return
        self.has_begun = True
        wanted = self._wanted
        if self._lines is not None:
            # it tries the allocator out, which is none of what the program takes
            self._enter("--lines", self._lines.profiler, self._lines.found)
        if threading.current_thread() is threading.main_thread():
            if wanted.budget is not None:
                # below those that see what it refuses
                self._enter(
                    "--budget",
                    self._budget,
                    lambda budget: {"peaks": {str(budget.device): budget.peak_bytes}},
                )
            if wanted.timeline:
                self._enter("--timeline", tenure.profiler.Timeline, _found_of_timeline)
            if wanted.on_oom:
                self._enter("--on-oom", self._oom, self._found_of_oom)
        elif wanted.budget is not None or wanted.timeline or wanted.on_oom:
            # these see the thread alone on which they begin
            told = "--budget, --timeline and --on-oom left out: torch was imported on another "
            self._notes.append(f"{told}thread than the main one. Import it in the program itself.")
        if wanted.leaks:
            self._enter("--leaks", self._leaks, self._found_of_leaks)
        for note in self._notes:
            say(f"tenure run: {note}")

    def end(self, error: BaseException | None) -> None:
        """Measure no more; what frames of an error hold is looked at before the others end."""
        self.has_ended, self._duration_s = True, perf_counter() - self._began
        if not self.has_begun:
            return
        with self._noted("at the end"), _variables_of(error, self._last):
            self.at_end = tenure.profiler.snapshot()
        self._last = None
        if isinstance(error, SystemExit):
            from tenure._oom import chain_of, is_oom

            # it may exit because of an error that it has caught
            self._n_refused += any(map(is_oom, chain_of(error)))
        how = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        for option in reversed(list(self._open)):
            opened, read = self._open.pop(option)
            with self._noted(option):
                opened.__exit__(*how)
                self._ended[option] = opened, read

    def abandon(self) -> None:
        """Stand aside in a child, which runs plainly."""
        self.has_ended = True
        for opened, _ in reversed(self._open.values()):
            with suppress(Exception):
                opened.__exit__(None, None, None)

    def facts(self, end: End) -> dict[str, Any]:
        """Return the fields of a recording that need no measuring."""
        return {
            "command": self._command,
            "began_at": self._began_at,
            "duration_s": self._duration_s,
            "ended": end[0],
            "exit_code": end[1],
            "versions": {"python": platform.python_version(), "tenure": tenure.__version__},
            "rank": rank_of_environment(),
        }

    def recording(self, end: End, notes: list[str], ram_bytes: int | None = None) -> Recording:
        """Return the recording of a run that ended so."""
        import torch

        facts = self.facts(end)
        found: dict[str, Any] = {"seeks_leaks": "--leaks" in self._ended}
        peaks: dict[str, int] = {}
        with self._noted("at the end"):
            # an accelerator that was not used has no peak
            peaks |= {name: n for name, n in _of_devices("max_memory_allocated").items() if n}
            found["memory"] = None if self.at_end is None else self._cut(self.at_end.report)
        for option, (ended, read) in self._ended.items():
            with self._noted(option):
                fields = read(ended)
                # of two that count the one that sees more
                for device, n_bytes in fields.pop("peaks", {}).items():
                    peaks[device] = max(n_bytes, peaks.get(device, 0))
                self._notes += fields.pop("notes", [])
                found |= fields
        facts["versions"]["torch"] = str(torch.__version__)
        all_notes = tuple(dict.fromkeys([*notes, *self._notes]))
        return tenure.profiler.Recording(
            **facts, **found, peaks=peaks, notes=all_notes, ram_bytes=ram_bytes
        )

    @contextmanager
    def _noted(self, option: str) -> Iterator[None]:
        """Note a failure in a block, which must not become an error of the program."""
        try:
            yield
        except Exception as failure:
            words = " ".join(str(failure).split())
            self._notes.append(f"{option}: {type(failure).__name__}: {words}")

    def _enter(self, option: str, make: Callable[[], Any], read: _Read) -> None:
        with self._noted(option):
            opened = make()
            opened.__enter__()
            self._open[option] = opened, read

    def _budget(self) -> Any:
        import torch

        device = torch.accelerator.current_accelerator(check_available=True)
        return tenure.adaptive.memory_budget(self._wanted.budget, device or "cpu")

    def _oom(self) -> ExitStack:
        from tenure._registries import refusal_watchers, retry_watchers

        opened = ExitStack()
        self._recorder = opened.enter_context(tenure.profiler.record_oom())
        # to see errors as they are raised costs each call of torch
        if not self._wanted.handled_oom:
            self._recorder._watch.set_aside()
            refusal_watchers.append(self._note_refusal)
            opened.callback(refusal_watchers.remove, self._note_refusal)
            retry_watchers.append(self._note_retry)
            opened.callback(retry_watchers.remove, self._note_retry)
        return opened

    def _note_refusal(self, _: str) -> None:
        from tenure._registries import handles_ooms

        self._n_refused += not handles_ooms.get()

    def _note_retry(self, error: BaseException) -> None:
        from tenure._oom import oom_info

        # those of a budget on the CPU are not among the errors that devices count
        info = oom_info(error)
        self._n_retried += info is None or info.device != "cpu"

    def _found_of_oom(self, _: ExitStack) -> dict[str, Any]:
        """Return the explanation; without one, a note on an error that the program has handled."""
        report = self._recorder.report
        is_news = report is None and not self._wanted.handled_oom
        n_ooms = sum(stats.get("num_ooms", 0) for stats in _of_devices("memory_stats").values())
        if is_news and (self._n_refused or n_ooms > self._n_retried):
            return {"notes": [_HANDLED]}
        return {"oom": report}

    def _leaks(self) -> ExitStack:
        from tenure._registries import leak_watchers

        self._growth = tenure.profiler.GrowthWatch()
        self._growth._before_look = self._before_look
        leak_watchers.append(self._note_report)
        opened = ExitStack()
        opened.callback(leak_watchers.remove, self._note_report)
        opened.enter_context(self._growth)
        return opened

    def _note_report(self, report: LeakReport) -> None:
        self._n_reports += 1
        if self._n_reports <= _MOST_REPORTS:
            self._reports.append(report)

    def _before_look(self) -> None:
        self._last = _last_function(sys._getframe())

    def _found_of_leaks(self, _: ExitStack) -> dict[str, Any]:
        """Return the piles that grew, and the tensors that outlived reporting scopes."""
        notes = [f"--leaks: {note}" for note in self._growth.notes]
        if more := self._n_reports - len(self._reports):
            notes.append(f"--leaks: {more} more scopes reported leaks, which are left out")
        return {
            "growth": self._growth.growth(at_end=self.at_end),
            "leaks": tuple(self._reports),
            "notes": notes,
            **self._growth._looks_told(with_end=self.at_end is not None),
        }

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


def _found_of_timeline(timeline: Timeline) -> dict[str, Any]:
    report = timeline.report
    return {
        "timeline": report,
        "peaks": {device.device: device.peak_bytes for device in report.devices},
        "notes": [f"--timeline: {note}" for note in report.notes],
    }


def _of_devices(name: str) -> dict[str, Any]:
    """Return what a function of the accelerator's module says of each device, if it was used."""
    import torch

    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    # asking would set it up, and not every backend counts
    ask = getattr(module, name, None)
    if device is None or ask is None or not getattr(module, "is_initialized", bool)():
        return {}
    return {f"{device.type}:{i}": ask(i) for i in range(module.device_count())}


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
    return [f"{told} not recorded"]


def rank_of_environment() -> int | None:
    """Return the rank of this process, as torchrun and others tell it."""
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
