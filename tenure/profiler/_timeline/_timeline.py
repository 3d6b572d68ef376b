"""Recording the memory of a block: what is public of it.

Invariant: a recording keeps no tensor alive and changes none; when it ends, torch is as it was.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import current_thread, get_ident
from types import TracebackType
from typing import Literal, NoReturn, Self

from torch import UntypedStorage
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._errors import ProfilerUsageError
from tenure._oom import oom_of_work
from tenure._registries import refusal_watchers
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.fakes import are_made
from tenure._torch.modes import remove_dispatch

from .._owners import OTHERS, take_census
from ._account import compose
from ._recorder import OperationMode, TimelineRecorder
from ._timeline_report import HostTimeline, OomMark, TimelineReport

_Status = Literal["not yet open", "open", "closed", "left to the parent process"]
_ONE_BLOCK = "A timeline is neither reusable nor reentrant: make a new one with Timeline()."
_NS = 1e9
# Who has what is asked for at most so much of the time: a twentieth where something did not fit, as
# in a program that runs out of memory again and again, and a hundredth after steps.
_OOM_SHARE, _STEP_SHARE = 20, 100
# of more errors of memory the first are kept
_MOST_OOMS = 200
_open: set[Timeline] = set()
"""Those whose blocks run; strongly, for their modes stand on torch's stack meanwhile."""


class Timeline:
    """Records what is in use over time: how much, what it counts as, which line and scope made it.

    The operations of the thread that opens it are seen, those of its backward passes included; of
    other threads and of compiled code only how much they take. On the host the peak is exact,
    temporaries inside operations included. A recording takes bounded memory however long it is.

    Example:
        >>> import torch
        >>> from tenure.profiler import Timeline
        >>> with Timeline() as timeline:
        ...     x = torch.ones(256, 256)
        ...     y = (x @ x).sum()
        >>> host = timeline.report.devices[0]
        >>> sum(host.by_category["other tensors"]) > 0
        True
    """

    def __init__(self) -> None:
        self._status: _Status = "not yet open"
        self._report: TimelineReport | None = None
        self._missing = " yet: its block has not ended. Ask after the block."

    @property
    def report(self) -> TimelineReport:
        """The recording.

        Raises:
            ProfilerUsageError: the block has not ended, this is a child that was forked in it, or
                an error came as the report was made.
        """
        if self._report is None:
            raise ProfilerUsageError(f"{self!r} has no report{self._missing}")
        return self._report

    def export(self, path: str | Path) -> Path:
        """Write what was recorded to a file: see `TimelineReport.export`.

        Raises:
            ProfilerUsageError: the block has not ended, or there is no such format.
        """
        return self.report.export(path)

    @never_compiled
    def __enter__(self) -> Self:
        """Begin to record this thread.

        Raises:
            ProfilerUsageError: the timeline was entered before, or tensors have no data for the
                time being, as in a prediction.
        """
        if is_dynamo_compiling():
            return self
        if self._status != "not yet open":
            raise ProfilerUsageError(f"{self!r} was entered a second time. {_ONE_BLOCK}")
        if are_made():
            raise ProfilerUsageError(
                f"{self!r} was entered by work that runs on tensors without data, which take no "
                "memory. Record the work itself."
            )
        self._notes: list[str] = []
        self._learned_ns = self._learning_ns = 0
        self._home = os.getpid(), get_ident()
        self._ooms: list[OomMark] = []
        self._limited_text: str | None = None
        self._watching = ExitStack()
        self._recorder = TimelineRecorder(self._failed)
        self._mode = OperationMode(self._recorder)
        try:
            self._recorder.open()
            for storage, category in _census():
                self._recorder.learn(storage, category)
            refusal_watchers.append(self._limited)
            self._watching.callback(refusal_watchers.remove, self._limited)
            self._recorder.start()
            # what passed since it was started is no part of the time on the system's clock
            self._began_at_ns = time.time_ns() - self._recorder.elapsed_ns()
            # parameters and the state of an optimizer may be gone at the end, with their function
            self._watching.callback(register_optimizer_step_post_hook(self._stepped).remove)
            modes = self._recorder.stream.modes
            modes.append(self._mode)
            self._watching.callback(modes.remove, self._mode)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        # no __exit__ follows
        except BaseException:
            self._close()
            raise
        self._status = "open"
        _watch_processes()
        _open.add(self)
        return self

    @never_compiled
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the recording; an exception of the block goes on.

        Raises:
            ProfilerUsageError: on another thread, and nothing changes.
        """
        if self._status != "open":
            return
        # a block may be closed by who is told of the fork before us
        if os.getpid() != self._home[0]:
            self._leave()
            return
        if get_ident() != self._home[1]:
            raise ProfilerUsageError(
                f"{self!r} was closed from thread {current_thread().name!r}, and stays open. A "
                "timeline belongs to the thread that opened it: close it there."
            )
        self._status = "closed"
        _open.discard(self)
        try:
            remove_dispatch(self._mode)
            duration_s = self._recorder.elapsed_ns() / _NS
            self._learn_now(0)
            self._close()
            self._report = self._composed(duration_s)
        # Ctrl-C as well: the search for who has what takes long
        except BaseException as error:
            self._missing = f": as its block ended, it was broken off by {error!r}."
            remove_dispatch(self._mode)
            self._recorder.abandon()
            self._close()
            # the block's own error is what matters: no error of ours takes its place
            if exc is None or not isinstance(error, Exception):
                raise
            exc.add_note(f"{self!r} has no report: {error!r}")
        finally:
            # the report is a summary: what it was made of may be large
            del self._recorder, self._mode

    def _stepped(self, *_: object) -> None:
        if self._recorder.is_open and get_ident() == self._home[1]:
            self._learn_now(_STEP_SHARE)

    def _failed(self, error: Exception) -> None:
        # the context is an error that the program handles just now, and was noted when it was new
        info = oom_of_work(error, error.__context__)
        # a limit below the mode has told of it already
        if info is not None and info.text != self._limited_text:
            self._note_oom(info.text)
        self._limited_text = None

    def _limited(self, text: str) -> None:
        """Note that a limit has refused an allocation, above the mode or below it."""
        if self._recorder.is_open:
            self._limited_text = text
            self._note_oom(text)

    def _note_oom(self, text: str) -> None:
        self._recorder.look()
        at_s = self._recorder.elapsed_ns() / _NS
        if len(self._ooms) < _MOST_OOMS:
            self._ooms.append(OomMark(at_s, text.partition("\n")[0]))
        else:
            self._note(f"memory ran out more than {_MOST_OOMS} times: the first are marked")
        # who has what is gone when the error is handled
        self._learn_now(_OOM_SHARE)

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _learn_now(self, share: int) -> None:
        """Note what the storages that are alive count as, if the last time was long ago.

        Args:
            share: how many times as long ago as it took; 0 asks whenever it was.
        """
        began_ns = time.perf_counter_ns()
        if began_ns < self._learned_ns + share * self._learning_ns:
            return
        try:
            for storage, category in _census():
                self._recorder.learn(storage, category)
        # memory may be short just now; the program has an error of its own to handle
        except Exception as error:
            self._note(f"who had what could not be asked at some time: {error!r}")
        self._learned_ns = time.perf_counter_ns()
        self._learning_ns = self._learned_ns - began_ns

    def _close(self) -> None:
        self._watching.close()
        self._recorder.close()

    def _leave(self) -> None:
        """At the end of the interpreter, and in a forked child: run plainly from here on."""
        _open.discard(self)
        self._recorder.abandon()
        # of another thread there is nothing left in a child
        if get_ident() == self._home[1]:
            remove_dispatch(self._mode)
        self._status = "left to the parent process"
        self._missing = (
            " here: this process was forked in its block, and the recording is that of the process "
            "which opened it. Open a timeline here."
        )
        self._close()

    def _composed(self, duration_s: float) -> TimelineReport:
        recorder = self._recorder
        accounts = recorder.accounts.values()
        devices = tuple(compose(account, recorder.places) for account in accounts)
        self._notes += [note for account in accounts for note in account.notes()]
        if recorder.stream.n_missed > recorder.n_missed:
            self._note(
                "temporaries inside operations were not all seen: another profiler had its thread"
            )
        if recorder.n_dropped:
            self._note(f"{recorder.n_dropped} short scopes are left out")
        rss = recorder.rss.moments
        return TimelineReport(
            devices=devices,
            scopes=tuple(sorted(recorder.spans, key=lambda span: (span.begin_s, span.depth))),
            ooms=tuple(self._ooms),
            host=HostTimeline(
                tuple(moment.at_ns / _NS for moment in rss), tuple(each.n_bytes for each in rss)
            ),
            n_events=recorder.n_events,
            duration_s=duration_s,
            began_at_ns=self._began_at_ns,
            notes=tuple(self._notes),
        )

    def __repr__(self) -> str:
        if self._report is not None:
            return f"<Timeline, {self._report.summary()}>"
        return f"<Timeline, {self._status}>"

    def __reduce__(self) -> NoReturn:
        raise ProfilerUsageError(
            f"{self!r} can't be copied or pickled: it belongs to one block. Keep its report."
        )


def _census() -> Iterator[tuple[UntypedStorage, str]]:
    """Return the storages that are alive, and what each counts as; empty where nothing owns it."""
    for entry in take_census(named=False):
        storage = entry.identity() if entry.identity is not None else None
        if storage is not None:
            yield storage, "" if entry.owner.category == OTHERS else entry.owner.category


@functools.cache
def _watch_processes() -> None:
    """Once: leave no session of torch to the end of the interpreter, or to a forked child."""
    atexit.register(_leave_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for timeline in tuple(_open):
        timeline._leave()
