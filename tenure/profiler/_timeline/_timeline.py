"""Recording the memory of a block: what is public of it.

Invariant: a recording keeps no tensor alive and changes none; when it ends, torch is as it was.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import current_thread, get_ident
from types import TracebackType
from typing import Literal, NoReturn, Self

from torch import UntypedStorage
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from tenure._errors import ProfilerUsageError
from tenure._oom import oom_of_work
from tenure._registries import refusal_watchers
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.fakes import are_made
from tenure._torch.modes import remove_dispatch

from .._owners import take_census
from ._categories import told_by_census
from ._composition import compose
from ._host import HostSamples
from ._operations import OperationMode
from ._places import Places
from ._recorder import Recorder
from ._timeline_report import OomMark, ScopeSpan, TimelineReport

_Status = Literal["not yet open", "open", "closed", "left to the parent process"]
_ONE_BLOCK = "A timeline is neither reusable nor reentrant: make a new one with Timeline()."
_NS = 1e9
# Who has what is asked for at most so much of the time: a twentieth where something did not fit, as
# in a program that runs out of memory again and again, and a hundredth after steps.
_OOM_SHARE, _STEP_SHARE = 20, 100
# Of more errors of memory the first and the last are kept.
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
        self._failure = ""

    @property
    def report(self) -> TimelineReport:
        """What was recorded.

        Raises:
            ProfilerUsageError: the block has not ended, this is a child that was forked in it, or
                an error came as the report was made.
        """
        if self._failure:
            raise ProfilerUsageError(
                f"{self!r} has no report: as its block ended, it was broken off by {self._failure}."
            )
        if self._report is None and self._status == "left to the parent process":
            raise ProfilerUsageError(
                f"{self!r} has no report here: this process was forked in its block, and the "
                "recording is that of the process which opened it. Open a timeline here."
            )
        if self._report is None:
            raise ProfilerUsageError(
                f"{self!r} has no report yet: what a storage was is known when its life, or the "
                "recording, has ended. Ask after the block."
            )
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
        self._ooms: list[tuple[int, str]] = []
        self._n_more_ooms = 0
        self._limited_text: str | None = None
        self._step_hook: RemovableHandle | None = None
        self._places, self._host = Places(), HostSamples()
        self._recorder = Recorder(self._places, self._host.take, self._failed)
        self._mode = OperationMode(self._recorder)
        try:
            self._recorder.open()
            for storage, category in _census():
                self._recorder.know(storage, category)
            refusal_watchers.append(self._limited)
            self._recorder.start()
            # what passed since it was started is no part of the time on the system's clock
            self._began_at_ns = time.time_ns() - (time.perf_counter_ns() - self._recorder.began_ns)
            # parameters and the state of an optimizer may be gone at the end, with their function
            self._step_hook = register_optimizer_step_post_hook(self._stepped)
            self._recorder.stream.modes.append(self._mode)
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
        try:
            here = os.getpid(), get_ident()
            if here == self._home:
                self._status = "closed"
                _open.discard(self)
                self._end()
                self._report = self._composed()
        # Ctrl-C as well: the search for who has what takes long
        except BaseException as error:
            self._break_off(error)
            # the block's own error is what matters: no error of ours takes its place
            if exc is None or not isinstance(error, Exception):
                raise
            exc.add_note(f"{self!r} has no report: {self._failure}")
            return
        # closed by who is told of the fork before us
        if here[0] != self._home[0]:
            _open.discard(self)
            self._leave_to_parent()
        elif here != self._home:
            raise ProfilerUsageError(
                f"{self!r} was closed from thread {current_thread().name!r}, and stays open. A "
                "timeline belongs to the thread that opened it: close it there."
            )
        else:
            # the report is a summary: what it was made of may be large
            del self._recorder, self._places, self._host, self._mode

    def _break_off(self, error: BaseException) -> None:
        """End what an error has interrupted, and take no more notes."""
        self._status, self._failure = "closed", repr(error)
        _open.discard(self)
        remove_dispatch(self._mode)
        self._recorder.abandon()
        self._close()
        del self._recorder, self._places, self._host, self._mode

    def _end(self) -> None:
        remove_dispatch(self._mode)
        duration_ns = time.perf_counter_ns() - self._recorder.began_ns
        self._learn_now(0)
        self._duration_s = duration_ns / _NS
        self._close()

    def _stepped(self, *_: object) -> None:
        if self._recorder.is_open and get_ident() == self._home[1]:
            self._recorder.stepped()
            self._learn_now(_STEP_SHARE, after_step=True)

    def _failed(self, error: Exception) -> None:
        # the context is an error that the program handles just now, and was noted when it was new
        info = oom_of_work(error, error.__context__)
        # a limit below the mode has told of it already
        if info is not None and info.text != self._limited_text:
            self._note_oom(info.text)
        self._limited_text = None

    def _limited(self, text: str) -> None:
        """A limit has refused something, above the mode or below it."""
        if self._recorder.is_open:
            self._limited_text = text
            self._note_oom(text)

    def _note_oom(self, text: str) -> None:
        self._recorder.step()
        self._ooms.append((self._recorder.elapsed_ns(), text.partition("\n")[0]))
        if len(self._ooms) > _MOST_OOMS:
            del self._ooms[_MOST_OOMS // 2]
            self._n_more_ooms += 1
        # who has what is gone when the error is handled
        self._learn_now(_OOM_SHARE)

    def _learn_now(self, share: int, *, after_step: bool = False) -> None:
        """Note what the storages that are alive count as, if the last time was long ago.

        Args:
            share: how many times as long ago as it took; 0 asks whenever it was.
            after_step: whether an optimizer has just made a step.
        """
        began_ns = time.perf_counter_ns()
        if began_ns < self._learned_ns + share * self._learning_ns:
            return
        try:
            for storage, category in _census():
                self._recorder.learn(storage, category, after_step=after_step)
            self._recorder.outliving.seen()
        # memory may be short just now; the program has an error of its own to handle
        except Exception as error:
            self._tell_once(f"who had what could not be asked at some time: {error!r}")
        self._learned_ns = time.perf_counter_ns()
        self._learning_ns = self._learned_ns - began_ns

    def _tell_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _close(self) -> None:
        if self._limited in refusal_watchers:
            refusal_watchers.remove(self._limited)
        if self._step_hook is not None:
            self._step_hook.remove()
        modes = self._recorder.stream.modes
        if self._mode in modes:
            modes.remove(self._mode)
        self._recorder.close()

    def _leave_to_parent(self) -> None:
        """In a forked child: run plainly from here on, also to the end of the block."""
        self._recorder.abandon()
        # of another thread there is nothing left here
        if get_ident() == self._home[1]:
            remove_dispatch(self._mode)
        self._status = "left to the parent process"
        self._close()

    def _composed(self) -> TimelineReport:
        recorder, bands = self._recorder, self._recorder.bands
        devices = []
        for account in recorder.accounts.values():
            timeline, excess = compose(account, self._places, bands)
            devices.append(timeline)
            self._notes += account.notes(excess)
        if recorder.has_missed:
            self._notes.append(
                "temporaries inside operations were not all seen: another profiler had its thread"
            )
        if bands.n_dropped:
            self._notes.append(f"{bands.n_dropped} short scopes are left out")
        if self._n_more_ooms:
            self._notes.append(
                f"memory ran out {self._n_more_ooms} times more than is marked: the first and the "
                f"last {_MOST_OOMS // 2} are"
            )
        spans = sorted(bands.spans, key=lambda span: (span.begin_ns, span.depth))
        return TimelineReport(
            tuple(devices),
            tuple(
                ScopeSpan(bands.names[s.name], s.depth, s.begin_ns / _NS, s.end_ns / _NS)
                for s in spans
            ),
            tuple(OomMark(at_ns / _NS, text) for at_ns, text in self._ooms),
            self._host.timeline(),
            recorder.n_events,
            self._duration_s,
            self._began_at_ns,
            (*self._notes, *self._host.notes),
        )

    def __repr__(self) -> str:
        if self._report is not None:
            return f"<Timeline, {self._report.summary()}>"
        return f"<Timeline, {self._status}>"

    def __reduce__(self) -> NoReturn:
        raise ProfilerUsageError(
            f"{self!r} can't be copied or pickled: it belongs to one block. Keep its report."
        )


def _census() -> Iterator[tuple[UntypedStorage, int]]:
    """The storages that are alive, and what each counts as."""
    for entry in take_census(named=False)[0]:
        storage = entry.identity() if entry.identity is not None else None
        if storage is not None:
            yield storage, told_by_census(entry.owner.category)


@functools.cache
def _watch_processes() -> None:
    """Once: leave no session of torch to the end of the interpreter, or to a forked child."""
    atexit.register(_abandon_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_all_to_parent)


def _abandon_all() -> None:
    for timeline in _open:
        timeline._recorder.abandon()
    _open.clear()


def _leave_all_to_parent() -> None:
    for timeline in _open:
        timeline._leave_to_parent()
    _open.clear()
