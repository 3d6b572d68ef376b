"""All that is measured of one run, begun and ended together.

Invariant: whatever happens in here, what runs goes on, and ends as it would; what went wrong is a
note in the recording.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import tenure
from tenure._visible import visible

from ._errors_of_theirs import End
from ._instrument import Instrument
from ._instruments import Budget, Memory, OnOom, OverTime
from ._leaks import Leaks

if TYPE_CHECKING:
    from tenure.profiler import Recording, Snapshot


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
    """The instruments of one run.

    Args:
        wanted: what is measured.
        lines: what measures lines, which know what runs; or None.
        told: is called with a line for who waits, where an instrument can't begin.
    """

    def __init__(
        self, wanted: Wanted, lines: Instrument | None, told: Callable[[str], None]
    ) -> None:
        self._instruments = _instruments(wanted, lines)
        self._told = told
        self._notes: list[str] = []

    def begin(self) -> None:
        """Measure from now on."""
        if threading.current_thread() is not threading.main_thread():
            self._leave_main_thread_alone()
        for instrument in self._instruments:
            self._safely(instrument, instrument.begin, is_told=True)

    def _leave_main_thread_alone(self) -> None:
        """What is of one thread is not begun on another one, where nobody could end it."""
        bound = [each for each in self._instruments if each.is_of_one_thread]
        self._instruments = [each for each in self._instruments if each not in bound]
        if bound:
            options = ", ".join(each.option for each in bound)
            note = f"{options} left out: torch was imported on another thread than the main one"
            self._notes.append(note)
            self._told(f"tenure run: {note}. Import it in the program itself.")

    def end(self, error: BaseException | None) -> None:
        """Measure no more; what began first ends last."""
        for instrument in reversed(self._instruments):
            self._safely(instrument, partial(instrument.end, error))

    def abandon(self) -> None:
        """Stand aside in a child."""
        for instrument in reversed(self._instruments):
            with suppress(Exception):
                instrument.abandon()

    def leave_out(self, kind: type[Instrument]) -> None:
        """Tell nothing of what such an instrument found."""
        self._instruments = [each for each in self._instruments if type(each) is not kind]

    def at_end(self) -> Snapshot | None:
        """What was alive at the end; None where that could not be told."""
        found = (each.at_end for each in self._instruments if isinstance(each, Memory))
        return next(found, None)

    def recording(self, facts: dict[str, Any], notes: list[str]) -> Recording:
        """What was found.

        Args:
            facts: as `facts_of` gives them.
            notes: what else is to be said.
        """
        import torch

        from tenure.profiler import Recording

        facts["versions"]["torch"] = str(torch.__version__)
        found: dict[str, Any] = {"peaks": {}, "seeks_leaks": False}
        for instrument in self._instruments:

            def take(each: Instrument = instrument) -> None:
                told = each.found()
                for device, n_bytes in told.pop("peaks", {}).items():
                    # of two that count the one that sees more
                    found["peaks"][device] = max(n_bytes, found["peaks"].get(device, 0))
                found.update(told)

            self._safely(instrument, take)
        theirs = [note for each in self._instruments for note in each.notes]
        all_of_them = tuple(dict.fromkeys([*notes, *self._notes, *theirs]))
        return Recording(**facts, **found, notes=all_of_them)

    def _safely(self, instrument: Instrument, act: Any, *, is_told: bool = False) -> None:
        try:
            act()
        # a measurement that fails must not become an error of the program
        except Exception as error:
            note = f"{instrument.option}: {type(error).__name__}: {' '.join(str(error).split())}"
            self._notes.append(note)
            if is_told:
                self._told(f"tenure run: {note}")


def _instruments(wanted: Wanted, lines: Instrument | None) -> list[Instrument]:
    """Those asked for; what begins first ends last."""
    leaks = Leaks() if wanted.leaks else None
    found: list[Instrument | None] = [
        leaks,
        # it tries the allocator out, which is none of what the program takes
        lines,
        # below those that see what it refuses
        None if wanted.budget_bytes is None else Budget(wanted.budget_bytes),
        OverTime() if wanted.timeline else None,
        OnOom(sees_handled=wanted.handled_oom) if wanted.on_oom else None,
        # what frames of an error hold is looked at before the others end
        Memory(leaks),
    ]
    return [each for each in found if each is not None]


def facts_of(
    command: tuple[str, ...], began_at: str, duration_s: float, end: End
) -> dict[str, Any]:
    """The fields of a recording that are no instrument's.

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
