"""The recording of this process: begun before the program, written when the process ends.

Invariant: whatever happens in here, the program goes on, and ends as it would; what went wrong is
a note in the recording, or a line on the standard error.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from types import CodeType
from typing import Any

import tenure
from tenure._report_files import write_facts
from tenure._reserve import Reserve

from ._errors_of_theirs import End, end_by_signal, end_of
from ._imports import Imports
from ._instruments import MAIN, Budget, Instrument, Leaks, Lines, Memory, OnOom, OverTime
from ._main_module import Program
from ._signals import Deaths

# What it takes to look, and then to write, where the process may have no more.
_RESERVES_BYTES = (48 << 20, 24 << 20)
# a recording of a program without torch, which is not imported for its sake
_EMPTY: dict[str, Any] = {
    "format": "tenure.Recording",
    "version": 1,
    "peaks": {},
    "leaks": [],
    "growth": [],
    "lines": None,
    "memory": None,
    "timeline": None,
    "oom": None,
    "tracks": [],
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``tenure run`` was asked for.

    Attributes:
        path: where the recording goes.
        replace: a file of this name may go.
        is_quiet: nothing is said of the recording.
        budget_bytes: what the program can hold, or None.
        leaks: whether to look for what grows.
        lines: functions whose lines are measured.
        timeline: whether to record live bytes over time.
        on_oom: whether to explain an out-of-memory error.
        next_command: what is said to be typed next, where the file is put in.
    """

    path: Path
    replace: bool = False
    is_quiet: bool = False
    budget_bytes: int | None = None
    leaks: bool = False
    lines: list[str] = field(default_factory=list)
    timeline: bool = False
    on_oom: bool = False
    next_command: str = "tenure report {}"


class Recorder:
    """Records one program in this process.

    Args:
        program: what is about to run.
        settings: what is wanted of it.
    """

    def __init__(self, program: Program, settings: Settings) -> None:
        self._program, self._settings = program, settings
        self._pid, self._folder = os.getpid(), os.getcwd()
        self._began_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._began = perf_counter()
        self._duration_s: float | None = None
        self._end: End | None = None
        self._has_torch = False
        self._is_written = False
        self._notes: list[str] = []
        self._lines = Lines(settings.lines, _main_names(program)) if settings.lines else None
        self._instruments = _instruments(settings, self._lines)
        self._deaths = Deaths(self._die)
        self._imports = self._watched_imports()
        self._reserves = [Reserve(n_bytes) for n_bytes in _RESERVES_BYTES]

    def begin(self) -> None:
        """From here on the program may run."""
        for reserve in self._reserves:
            reserve.take()
        # first of all, so that it is called last: after all that the program registers
        atexit.register(self._at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._deaths.before_fork,
                after_in_parent=self._deaths.after_fork,
                after_in_child=self._abandon,
            )
        self._deaths.begin()
        self._imports.begin()

    def on_code(self, code: CodeType) -> None:
        """Be told the code of the program's own module before it runs."""
        if self._lines is not None:
            self._lines.on_code(MAIN, code)

    def ended(self, error: BaseException | None) -> None:
        """Be told that the program's code has ended; threads and exit handlers may go on."""
        if self._end is None and os.getpid() == self._pid:
            self._end = end_of(error)
            self._measured(error)

    def _measured(self, error: BaseException | None) -> None:
        """End all measuring, once."""
        if self._duration_s is not None:
            return
        self._duration_s = perf_counter() - self._began
        self._imports.end()
        self._free_reserve()
        if self._has_torch:
            for instrument in reversed(self._instruments):
                self._safely(instrument, partial(instrument.end, error))

    # --- torch is there

    def _watched_imports(self) -> Imports:
        on_code: dict[str, Callable[[str, CodeType], None]] = {}
        on_done: dict[str, Callable[[], None]] = {"torch": self._torch_is_there}
        if self._lines is not None:
            lines = self._lines
            for name in lines.modules:
                on_code[name] = lines.on_code
                on_done[name] = partial(lines.on_module, name)
        return Imports(on_code, on_done)

    def _torch_is_there(self) -> None:
        if self._has_torch or self._duration_s is not None:
            return
        self._has_torch = True
        if threading.current_thread() is not threading.main_thread():
            self._notes.append(
                "torch was imported on another thread than the main one: --budget, --timeline and "
                "--on-oom are about that thread"
            )
        for instrument in self._instruments:
            self._safely(instrument, instrument.begin, is_told=True)

    def _safely(self, instrument: Instrument, act: Any, *, is_told: bool = False) -> None:
        try:
            act()
        # a measurement that fails must not become an error of the program
        except Exception as error:
            what = type(instrument).__name__.lower()
            note = f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"
            self._notes.append(note)
            if is_told:
                _say(f"tenure run: {note}")

    # --- the end

    def _abandon(self) -> None:
        """In a child: run plainly, write nothing."""
        self._deaths.end()
        self._deaths.after_fork()
        if self._duration_s is not None:
            return
        self._duration_s = 0.0
        self._imports.end()
        if self._has_torch:
            for instrument in reversed(self._instruments):
                with suppress(Exception):
                    instrument.abandon()

    def _die(self, number: int) -> None:
        """A signal is about to end the process, without its exit handlers."""
        if self._end is None:
            self._end = end_by_signal(number)
        self._measured(None)
        self._write()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._measured(None)
        self._write()
        self._deaths.end()

    def _write(self) -> None:
        if self._is_written or os.getpid() != self._pid:
            return
        self._is_written = True
        self._free_reserve()
        path = self._settings.path
        try:
            written = self._written()
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            _say(f"tenure run: error: {path} could not be written: {reason}")
            return
        if not self._settings.is_quiet:
            shown = _shown(written, self._folder)
            _say(f"Wrote {shown}. See it with: {self._settings.next_command.format(shown)}")

    def _written(self) -> Path:
        path, replace = self._settings.path, self._settings.replace
        try:
            return write_facts(path, self._facts(), replace=replace)
        except MemoryError:
            # what was alive is most of it
            self._instruments = [each for each in self._instruments if type(each) is not Memory]
            self._notes.append("what was alive at the end is left out: too little memory was left")
            return write_facts(path, self._facts(), replace=replace)

    def _free_reserve(self) -> None:
        if self._reserves:
            self._reserves.pop(0).free()

    def _facts(self) -> dict[str, Any]:
        end = self._end or End("ended outside of its code", 0)
        facts: dict[str, Any] = {
            "command": list(self._program.command),
            "began_at": self._began_at,
            "duration_s": self._duration_s or 0.0,
            "ended": end.text,
            "exit_code": end.exit_code,
            "versions": {"python": platform.python_version(), "tenure": tenure.__version__},
            "rank": rank_of_environment(),
        }
        if not self._has_torch:
            self._notes.append("the program did not import torch")
            return {**_EMPTY, **facts, "notes": self._notes}
        recording: dict[str, Any] = self._recording(facts).to_dict()
        return recording

    def _recording(self, facts: dict[str, Any]) -> Any:
        import torch

        from tenure.profiler import Recording

        facts["command"] = self._program.command
        facts["versions"]["torch"] = str(torch.__version__)
        found: dict[str, Any] = {"peaks": {}}
        for instrument in self._instruments:

            def take(each: Instrument = instrument) -> None:
                told = each.found()
                for device, n_bytes in told.pop("peaks", {}).items():
                    # of two that count the one that sees more
                    found["peaks"][device] = max(n_bytes, found["peaks"].get(device, 0))
                found.update(told)

            self._safely(instrument, take)
        notes = [note for each in self._instruments for note in each.notes]
        return Recording(**facts, **found, notes=tuple(dict.fromkeys([*self._notes, *notes])))


def _instruments(settings: Settings, lines: Lines | None) -> list[Instrument]:
    """Those asked for; what begins first ends last."""
    leaks = Leaks() if settings.leaks else None
    found: list[Instrument | None] = [
        leaks,
        # it tries the allocator out, which is none of what the program takes
        lines,
        # below those that see what it refuses
        None if settings.budget_bytes is None else Budget(settings.budget_bytes),
        OverTime() if settings.timeline else None,
        OnOom() if settings.on_oom else None,
        # what frames of an error hold is looked at before the others end
        Memory(leaks),
    ]
    return [each for each in found if each is not None]


def _main_names(program: Program) -> tuple[str, ...]:
    module = getattr(program, "module", None)
    if module is not None:
        return (module, f"{module}.{MAIN}")
    return (program.argv[0], os.path.basename(program.argv[0]))


def rank_of_environment() -> int | None:
    """The rank of this process, as torchrun and others tell it."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _shown(path: Path, folder: str) -> str:
    # for the shell, which has not gone with the program
    inside = os.path.relpath(path, folder)
    return str(path) if inside.startswith(os.pardir) else inside


def _say(line: str) -> None:
    # it may be closed, or a pipe that nobody reads
    with suppress(Exception):
        print(line, file=sys.stderr, flush=True)
