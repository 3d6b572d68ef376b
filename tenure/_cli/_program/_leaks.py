"""``--leaks``: what grows from step to step, and what outlives scopes that report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any

from ._child_memory import ChildMemory
from ._instrument import Instrument
from ._last_function import last_function

if TYPE_CHECKING:
    from tenure.profiler import GrowthWatch, Snapshot
    from tenure.scopes import LeakReport

_MOST_REPORTS = 100


class Leaks(Instrument):
    """``--leaks``: what grows from step to step, and what outlives scopes that report."""

    option = "--leaks"

    def __init__(self) -> None:
        super().__init__()
        self._watch: GrowthWatch | None = None
        self._reports: list[LeakReport] = []
        self._n_reports = 0
        self._children = ChildMemory()
        self._last_function: FrameType | None = None

    def _before_look(self) -> None:
        self._last_function = last_function(sys._getframe())
        self._children.look()

    def growth(self, at_end: Snapshot) -> dict[str, Any]:
        """Fields of the recording, where the end could be looked at."""
        if self._watch is None:
            return {}
        growth = self._watch.growth(at_end=at_end)
        return {"growth": growth, **self._watch._looks_told(with_end=True)}

    @contextmanager
    def with_variables_of(self, error: BaseException | None) -> Iterator[None]:
        """A block in which variables of functions that the program has ended in are named."""
        from tenure._registries import ended_frames

        frames = [each for each, _ in walk_tb(None if error is None else error.__traceback__)]
        if self._last_function is not None:
            frames.append(self._last_function)
        # what runs still has variables by itself
        running = {id(frame) for frame, _ in walk_stack(sys._getframe())}
        found = {id(frame): frame for frame in frames if id(frame) not in running}
        ended_frames.extend(found.values())
        try:
            yield
        finally:
            ended_frames.clear()
            self._last_function = None

    def _told(self, report: LeakReport) -> None:
        self._n_reports += 1
        if len(self._reports) < _MOST_REPORTS:
            self._reports.append(report)

    def begin(self) -> None:
        from tenure._registries import leak_watchers
        from tenure.profiler import GrowthWatch

        leak_watchers.append(self._told)
        self._watch = GrowthWatch()
        self._watch._before_look = self._before_look
        self._watch.begin()

    def end(self, error: BaseException | None) -> None:
        from tenure._registries import leak_watchers

        self._last_function = None
        if self._watch is not None:
            self._watch.end()
            with suppress(ValueError):
                leak_watchers.remove(self._told)

    def found(self) -> dict[str, Any]:
        if self._watch is None:
            return {}
        self.notes += [f"--leaks: {note}" for note in self._watch.notes]
        self.notes += self._children.notes()
        if more := self._n_reports - len(self._reports):
            self.notes.append(f"--leaks: {more} more scopes reported leaks, which are left out")
        reports = tuple(self._reports)
        found = {"growth": self._watch.growth(), **self._watch._looks_told(with_end=False)}
        return {"seeks_leaks": True, "leaks": reports, **found}
