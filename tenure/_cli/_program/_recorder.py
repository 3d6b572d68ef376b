"""A program that runs in this process, and the recording of it, written when the process ends.

Invariant: whatever happens in here, the program goes on, and ends as it would; what went wrong is
a note in the recording, or a line on the standard error.
"""

from __future__ import annotations

import atexit
import os
import signal
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from tenure._report_files import write_facts
from tenure._reserve import Reserve

from ._ends import Deaths, End, end_of, tell_without_us
from ._imports import Imports
from ._lines import Lines
from ._main_module import Program
from ._measuring import MAIN, Measuring, Wanted, children_in_words, facts_of, say

# To look and to write if the process can have no more, or to write alone.
_RESERVES_BYTES = (72 << 20, 24 << 20)


def run_recorded(
    program: Program, wanted: Wanted, path: Path, *, replace: bool = False, is_quiet: bool = False
) -> int:
    """Run a program in this process, and record it.

    Args:
        program: it is about to run.
        wanted: what is measured.
        path: where the recording goes.
        replace: a file of this name may go; else the next free name is taken.
        is_quiet: nothing is printed about the recording.

    Returns:
        The exit code of a program that came to its end.

    Raises:
        BaseException: whatever the program raises, so that the interpreter prints it and ends with
            the code that it has for it.
    """
    recorder = Recorder(program, wanted, path, replace, is_quiet)
    program.become_main()
    recorder.begin()
    try:
        program.execute(partial(recorder.lines.on_code, MAIN))
    except BaseException as error:
        recorder.ended(error)
        tell_without_us(error)
        raise
    recorder.ended(None)
    return 0


class Recorder:
    """Records one program in this process; the arguments are those of `run_recorded`."""

    def __init__(
        self, program: Program, wanted: Wanted, path: Path, replace: bool, is_quiet: bool
    ) -> None:
        self.lines = Lines(wanted.lines, _main_names(program))
        self._program, self._seeks_leaks = program, wanted.leaks
        self._path, self._replace, self._is_quiet = path, replace, is_quiet
        self._pid, self._folder = os.getpid(), os.getcwd()
        self._began_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._began = perf_counter()
        self._duration_s: float | None = None
        self._end: End | None = None
        self._has_torch = self._is_written = False
        self._n_forked = 0
        self._measuring = Measuring(wanted, self.lines if wanted.lines else None)
        self._deaths = Deaths(self._die)
        self._imports = Imports(
            {"torch", *self.lines.modules}, self.lines.on_code, self._is_imported
        )
        self._reserve = Reserve(*_RESERVES_BYTES)

    def begin(self) -> None:
        """From here on the program may run."""
        self._reserve.take()
        # first of all, so that it is called last: after all that the program registers
        atexit.register(self._at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._deaths.end,
                after_in_parent=self._forked,
                after_in_child=self._abandon,
            )
        self._deaths.begin()
        self._imports.begin()

    def ended(self, error: BaseException | None) -> None:
        """Note that the program's code has ended; threads and exit handlers may go on."""
        if self._end is None and os.getpid() == self._pid:
            with self._deaths.held():
                self._end = end_of(error)
                self._measured(error)

    def _is_imported(self, module: str) -> None:
        self.lines.on_module(module)
        if module == "torch" and not self._has_torch and self._duration_s is None:
            self._has_torch = True
            self._measuring.begin()

    def _measured(self, error: BaseException | None) -> None:
        """End all measuring, once."""
        if self._duration_s is None:
            self._duration_s = perf_counter() - self._began
            self._imports.end()
            self._reserve.free()
            if self._has_torch:
                self._measuring.end(error)

    # --- the end

    def _forked(self) -> None:
        self._n_forked += 1
        self._deaths.begin()

    def _abandon(self) -> None:
        """In a child: run plainly, write nothing."""
        self._deaths.end()
        if self._duration_s is None:
            self._duration_s = 0.0
            self._imports.end()
            if self._has_torch:
                self._measuring.abandon()

    def _die(self, number: int) -> None:
        """A signal is about to end the process, without its exit handlers."""
        if self._end is None:
            self._end = End(signal.Signals(number).name, 128 + number)
        self._write()

    def _at_exit(self) -> None:
        self._write()
        self._deaths.end()

    def _write(self) -> None:
        if self._is_written or os.getpid() != self._pid:
            return
        with self._deaths.held():
            self._measured(None)
            self._is_written = True
            try:
                facts, summary = self._facts()
                path = write_facts(self._path, facts, replace=self._replace)
            except Exception as error:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                say(f"tenure run: error: {self._path} could not be written: {reason}")
                return
            if not self._is_quiet:
                # for the shell, which has not gone with the program
                inside = os.path.relpath(path, self._folder)
                shown = str(path) if inside.startswith(os.pardir) else inside
                for line in (*summary, f"Wrote {shown}. See it with: tenure report {shown}"):
                    say(line)

    def _facts(self) -> tuple[dict[str, Any], list[str]]:
        """Return the recording as it is written, and the lines that sum it up."""
        end = self._end or End("ended outside of its code", 0)
        command = self._program.command
        facts = facts_of(command, self._began_at, self._duration_s or 0.0, end)
        if not self._has_torch:
            # torch is not imported for the sake of a program that did not
            facts |= {"format": "tenure.Recording", "version": 1, "command": list(command)}
            facts |= {"seeks_leaks": self._seeks_leaks, "n_looks": 0, "n_steps": 0}
            return {**facts, "notes": ["the program did not import torch"]}, []
        from tenure._host_memory import peak_resident_bytes

        facts["ram_bytes"] = peak_resident_bytes()
        notes = children_in_words(self._n_forked)
        recording = self._measuring.recording(facts, notes)
        # a name that was mistaken, and what was not seen, is told at once
        missing = [f"tenure run: {note}" for note in recording.notes if note.startswith("--lines")]
        return recording.to_dict(), [*missing, *recording.summary().splitlines(), *notes]


def _main_names(program: Program) -> tuple[str, ...]:
    if program.module:
        return (program.module, f"{program.module}.{MAIN}")
    return (program.argv[0], os.path.basename(program.argv[0]))
