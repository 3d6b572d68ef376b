"""A program that runs in this process, and the recording of it, written when the process ends.

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

from ._ends import End, end_by_signal, end_of, tell_without_us
from ._imports import Imports
from ._lines import Lines
from ._main_module import Program
from ._measuring import MAIN, Measuring, Wanted, children_in_words, facts_of, say
from ._own_modules import own_modules
from ._signals import Deaths

# What it takes to look, and then to write, where the process may have no more.
_RESERVES_BYTES = (48 << 20, 24 << 20)


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``tenure run`` was asked for.

    Attributes:
        wanted: what is to be measured.
        path: where the recording goes.
        replace: a file of this name may go; else the next free name is taken.
        is_quiet: nothing is said of the recording.
    """

    wanted: Wanted
    path: Path
    replace: bool = False
    is_quiet: bool = False


def run_recorded(program: Program, settings: Settings) -> int:
    """Run a program in this process, and record it.

    Returns:
        The exit code of a program that came to its end.

    Raises:
        BaseException: whatever the program raises, so that the interpreter tells it and ends with
            the code that it has for it.
    """
    recorder = Recorder(program, settings)
    program.become_main()
    recorder.begin()
    try:
        program.execute(recorder.on_code)
    except BaseException as error:
        recorder.ended(error)
        tell_without_us(error)
        raise
    recorder.ended(None)
    return 0


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
        self._n_forked = 0
        self._summary: list[str] = []
        asked = settings.wanted.lines
        self._lines = Lines(asked, _main_names(program)) if asked else None
        self._measuring = Measuring(settings.wanted, self._lines)
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
                after_in_parent=self._forked,
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
            for name in self._lines.modules:
                on_code[name] = self._lines.on_code
                on_done[name] = partial(self._lines.on_module, name)
        return Imports(on_code, on_done)

    def _torch_is_there(self) -> None:
        if self._has_torch or self._duration_s is not None:
            return
        self._has_torch = True
        with own_modules.ours():
            self._measuring.begin()

    # --- the end

    def _forked(self) -> None:
        self._n_forked += 1
        self._deaths.after_fork()

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
        path, replace = self._settings.path, self._settings.replace
        try:
            with own_modules.ours():
                try:
                    path = write_facts(path, self._facts(), replace=replace)
                except MemoryError:
                    # what was alive is most of it
                    path = write_facts(path, self._facts(with_memory=False), replace=replace)
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            say(f"tenure run: error: {path} could not be written: {reason}")
            return
        if not self._settings.is_quiet:
            # for the shell, which has not gone with the program
            inside = os.path.relpath(path, self._folder)
            shown = str(path) if inside.startswith(os.pardir) else inside
            for line in self._summary:
                say(line)
            say(f"Wrote {shown}. See it with: tenure report {shown}")

    def _free_reserve(self) -> None:
        if self._reserves:
            self._reserves.pop(0).free()

    def _facts(self, *, with_memory: bool = True) -> dict[str, Any]:
        end = self._end or End("ended outside of its code", 0)
        facts = facts_of(self._program.command, self._began_at, self._duration_s or 0.0, end)
        if not self._has_torch:
            # torch is not imported for the sake of a program that did not
            facts |= {"format": "tenure.Recording", "version": 1}
            facts |= {"seeks_leaks": self._settings.wanted.leaks, "n_looks": 0, "n_steps": 0}
            facts["notes"] = ["the program did not import torch"]
            return {**facts, "command": list(self._program.command)}
        notes = children_in_words(self._n_forked)
        if not with_memory:
            notes.append("what was alive at the end is left out: too little memory was left")
        from tenure._host_memory import peak_resident_bytes

        facts["ram_bytes"] = peak_resident_bytes()
        recording = self._measuring.recording(facts, notes, with_memory=with_memory)
        # a name that was mistaken, and what was not seen, is told at once
        missing = [f"tenure run: {note}" for note in recording.notes if note.startswith("--lines")]
        self._summary = [*missing, *recording.summary().splitlines(), *notes]
        found: dict[str, Any] = recording.to_dict()
        return found


def _main_names(program: Program) -> tuple[str, ...]:
    if program.module:
        return (program.module, f"{program.module}.{MAIN}")
    return (program.argv[0], os.path.basename(program.argv[0]))
