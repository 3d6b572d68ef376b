"""The recording of this process: begun before the program, written when the process ends.

Invariant: whatever happens in here, the program goes on, and ends as it would; what went wrong is
a note in the recording, or a line on the standard error.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from types import CodeType
from typing import Any

from tenure._report_files import write_facts
from tenure._reserve import Reserve

from ._errors_of_theirs import End, end_by_signal, end_of
from ._imports import Imports
from ._instruments import MAIN, Lines, Memory
from ._main_module import Program
from ._measuring import Measuring, Wanted, facts_of, say
from ._own_modules import own_modules
from ._signals import Deaths

# What it takes to look, and then to write, where the process may have no more.
_RESERVES_BYTES = (48 << 20, 24 << 20)
# a recording of a program without torch, which is not imported for its sake
_EMPTY: dict[str, Any] = {
    "format": "tenure.Recording",
    "version": 1,
    "peaks": {},
    "seeks_leaks": False,
    "n_looks": None,
    "look_steps": [],
    "n_steps": None,
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
        wanted: what is to be measured.
        path: where the recording goes.
        replace: a file of this name may go.
        is_quiet: nothing is said of the recording.
        next_command: what is said to be typed next, where the file is put in.
    """

    wanted: Wanted
    path: Path
    replace: bool = False
    is_quiet: bool = False
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
        self._summary: tuple[str, ...] = ()
        self._notes: list[str] = []
        asked = settings.wanted.lines
        self._lines = Lines(asked, _main_names(program)) if asked else None
        self._measuring = Measuring(settings.wanted, self._lines, say)
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
            with self._deaths.held():
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
            with own_modules.ours():
                self._measuring.end(error)

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
        with own_modules.ours():
            self._measuring.begin()

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
            self._measuring.abandon()

    def _die(self, number: int) -> None:
        """A signal is about to end the process, without its exit handlers."""
        with self._deaths.held():
            if self._end is None:
                self._end = end_by_signal(number)
            self._measured(None)
            self._write()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._deaths.held():
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
            with own_modules.ours():
                written = self._written()
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            say(f"tenure run: error: {path} could not be written: {reason}")
            return
        if not self._settings.is_quiet:
            for line in self._summary:
                say(line)
            shown = _shown(written, self._folder)
            say(f"Wrote {shown}. See it with: {self._settings.next_command.format(shown)}")

    def _written(self) -> Path:
        path, replace = self._settings.path, self._settings.replace
        try:
            return write_facts(path, self._facts(), replace=replace)
        except MemoryError:
            # what was alive is most of it
            self._measuring.leave_out(Memory)
            self._notes.append("what was alive at the end is left out: too little memory was left")
            return write_facts(path, self._facts(), replace=replace)

    def _free_reserve(self) -> None:
        if self._reserves:
            self._reserves.pop(0).free()

    def _facts(self) -> dict[str, Any]:
        end = self._end or End("ended outside of its code", 0)
        facts = facts_of(self._program.command, self._began_at, self._duration_s or 0.0, end)
        if not self._has_torch:
            self._notes.append("the program did not import torch")
            # no tuple: nothing of a report makes it plain
            facts["command"] = list(self._program.command)
            sought = {"seeks_leaks": self._settings.wanted.leaks, "n_looks": 0, "n_steps": 0}
            return {**_EMPTY, **sought, **facts, "notes": self._notes}
        recording = self._measuring.recording(facts, self._notes)
        # a name that was mistaken is told at once
        missing = (f"tenure run: {note}" for note in recording.notes if note.startswith("--lines"))
        self._summary = (*missing, *recording.summary().splitlines())
        found: dict[str, Any] = recording.to_dict()
        return found


def _main_names(program: Program) -> tuple[str, ...]:
    module = getattr(program, "module", None)
    if module is not None:
        return (module, f"{module}.{MAIN}")
    return (program.argv[0], os.path.basename(program.argv[0]))


def _shown(path: Path, folder: str) -> str:
    # for the shell, which has not gone with the program
    inside = os.path.relpath(path, folder)
    return str(path) if inside.startswith(os.pardir) else inside
