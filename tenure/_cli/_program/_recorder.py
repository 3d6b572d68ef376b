"""A program that runs in this process, and the recording of it, written when the process ends.

Invariant: whatever happens in here, the program goes on, and ends as it would; what went wrong is
a note in the recording, or a line on the standard error.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.abc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tenure._report_files import write_facts
from tenure._reserve import Reserve

from .._run import shown_path
from ._ends import Deaths, End, end_of, tell_without_us
from ._lines import Lines
from ._main_module import Program
from ._measuring import Measuring, children_in_words, say

# To look and to write if the process can have no more, or to write alone.
_RESERVES_BYTES = (72 << 20, 24 << 20)


class RunRecorder:
    """Records one program in this process.

    Args:
        program: it is about to run.
        wanted: the options of the verb.
        path: where the recording goes. Without ``wanted.force`` a file of this name stays, and the
            next free name is taken.
    """

    def __init__(self, program: Program, wanted: argparse.Namespace, path: Path) -> None:
        self.lines = Lines(wanted.lines, program.own_names)
        self._program, self._wanted, self._path = program, wanted, path
        self._pid, self._folder = os.getpid(), os.getcwd()
        self._end: End | None = None
        self._is_written = False
        self._n_forked = 0
        command = ("python", *program.words)
        self._measuring = Measuring(command, wanted, self.lines if wanted.lines else None)
        self._deaths = Deaths(self._die)
        self._imports = _Imports({"torch", *self.lines.modules}, self._is_imported)
        self._reserve = Reserve(*_RESERVES_BYTES)

    def run(self) -> int:
        """Run the program, and record it.

        Returns:
            The exit code of a program that came to its end.

        Raises:
            BaseException: whatever the program raises, so that the interpreter prints it and ends
                with the code that it has for it.
        """
        self._program.become_main()
        self._reserve.take()
        # first of all, so that they are called last: after all that the program registers
        atexit.register(self._deaths.end)
        atexit.register(self._write)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._deaths.end,
                after_in_parent=self._forked,
                after_in_child=self._abandon,
            )
        self._deaths.begin()
        self._imports.begin()
        try:
            self._program.execute(self.lines.on_code)
        except BaseException as error:
            self._code_ended(error)
            tell_without_us(error)
            raise
        self._code_ended(None)
        return 0

    def _code_ended(self, error: BaseException | None) -> None:
        """Note that the program's code has ended; threads and exit handlers may go on."""
        if self._end is None and os.getpid() == self._pid:
            with self._deaths.held():
                self._end = end_of(error)
                if _goes_on(error):
                    # Python waits for the threads of the program, and then calls this first
                    atexit.register(self._threads_ended)
                else:
                    self._measured(error)

    def _threads_ended(self) -> None:
        with self._deaths.held():
            self._measured()

    def _is_imported(self, module: str) -> None:
        self.lines.on_module(module)
        if module == "torch":
            self._measuring.begin()

    def _measured(self, error: BaseException | None = None) -> None:
        """End all measuring, once."""
        if not self._measuring.has_ended:
            self._imports.end()
            self._reserve.free()
            self._measuring.end(error)

    # --- the end

    def _forked(self) -> None:
        self._n_forked += 1
        self._deaths.begin()

    def _abandon(self) -> None:
        """In a child: run plainly, write nothing."""
        self._deaths.end()
        if not self._measuring.has_ended:
            self._imports.end()
            self._measuring.abandon()

    def _die(self, number: int) -> None:
        """Write the recording before a signal ends the process without its exit handlers."""
        if not self._measuring.has_ended:
            self._end = signal.Signals(number).name, 128 + number
        self._write()

    def _write(self) -> None:
        if self._is_written or os.getpid() != self._pid:
            return
        with self._deaths.held():
            self._measured()
            self._is_written = True
            try:
                facts, summary = self._facts()
                path = write_facts(self._path, facts, replace=self._wanted.force)
            except Exception as error:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                say(f"tenure run: error: {self._path} could not be written: {reason}")
                return
            if not self._wanted.quiet:
                # for the shell, which has not gone with the program
                shown = shown_path(path, self._folder)
                for line in (*summary, f"Wrote {shown}. See it with: tenure report {shown}"):
                    say(line)

    def _facts(self) -> tuple[dict[str, Any], list[str]]:
        """Return the recording as it is written, and the lines that sum it up."""
        end = self._end or ("ended outside of its code", 0)
        if not self._measuring.has_begun:
            # torch is not imported for the sake of a program that did not
            head = {"format": "tenure.Recording", "version": 1, **self._measuring.facts(end)}
            looks = {"seeks_leaks": self._wanted.leaks, "n_looks": 0, "n_steps": 0}
            return {**head, **looks, "notes": ["the program did not import torch"]}, []
        from tenure._host_memory import peak_resident_bytes

        notes = children_in_words(self._n_forked)
        recording = self._measuring.recording(end, notes, peak_resident_bytes())
        # a name that was mistaken, and what was not seen, is told at once
        told = ("--lines", "--on-oom")
        missing = [f"tenure run: {note}" for note in recording.notes if note.startswith(told)]
        return recording.to_dict(), [*missing, *recording.summary().splitlines(), *notes]


def _goes_on(error: BaseException | None) -> bool:
    """Return whether a program whose code has ended still runs on threads."""
    others = {*threading.enumerate()} - {threading.main_thread()}
    return isinstance(error, SystemExit | None) and not all(each.daemon for each in others)


class _Imports(importlib.abc.MetaPathFinder):
    """Finds nothing itself, but calls back once one of some modules was imported.

    Args:
        names: the full names of the modules.
        on_done: is called with a name.
    """

    def __init__(self, names: set[str], on_done: Callable[[str], None]) -> None:
        self._names, self._on_done = names, on_done

    def begin(self) -> None:
        """Watch from now on; what was imported already is done at once."""
        for name in self._names & sys.modules.keys():
            self._on_done(name)
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Watch no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the finders after this one find, with a loader that is watched."""
        others = [each for each in sys.meta_path if each is not self]
        for finder in others if fullname in self._names else ():
            if spec := finder.find_spec(fullname, path, target):
                # a loader in C, or without room for attributes, can't be watched
                if hasattr(spec.loader, "__dict__"):
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        theirs = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            theirs(module)
            # else other threads that import it, as those that we start, would wait for us
            module.__spec__._initializing = False  # type: ignore[union-attr]
            self._on_done(module.__name__)

        loader.exec_module = exec_module
