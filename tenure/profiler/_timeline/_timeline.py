"""Recording the memory of a block: what is public of it.

Invariant: a recording keeps no tensor alive and changes none; when it ends, torch is as it was.
"""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from threading import current_thread, get_ident
from types import TracebackType
from typing import Literal, NoReturn, Self

from tenure._errors import ProfilerUsageError
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.fakes import are_made

from ._recorder import TimelineRecorder
from ._timeline_report import TimelineReport

_Status = Literal["not yet open", "open", "closed", "left to the parent process"]
_ONE_BLOCK = "A timeline is neither reusable nor reentrant: make a new one with Timeline()."
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

    # see `TimelineRecorder`
    _keeps_before = False

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
        self._home = os.getpid(), get_ident()
        self._recorder = TimelineRecorder(keeps_before=self._keeps_before)
        try:
            self._recorder.open()
        # no __exit__ follows
        except BaseException:
            self._recorder.abandon()
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
            self._report = self._recorder.close()
        # Ctrl-C as well: the search for who has what takes long
        except BaseException as error:
            self._missing = f": as its block ended, it was broken off by {error!r}."
            self._recorder.abandon()
            # the block's own error is what matters: no error of ours takes its place
            if exc is None or not isinstance(error, Exception):
                raise
            exc.add_note(f"{self!r} has no report: {error!r}")
        finally:
            # the report is a summary: what it was made of may be large
            del self._recorder

    def _leave(self) -> None:
        """At the end of the interpreter, and in a forked child: run plainly from here on."""
        _open.discard(self)
        # of another thread there is nothing left in a child, and no mode is taken off this one
        self._recorder.abandon()
        self._status = "left to the parent process"
        self._missing = (
            " here: this process was forked in its block, and the recording is that of the process "
            "which opened it. Open a timeline here."
        )

    def __repr__(self) -> str:
        if self._report is not None:
            return f"<Timeline, {self._report.summary()}>"
        return f"<Timeline, {self._status}>"

    def __reduce__(self) -> NoReturn:
        raise ProfilerUsageError(
            f"{self!r} can't be copied or pickled: it belongs to one block. Keep its report."
        )


@functools.cache
def _watch_processes() -> None:
    """Once: leave no session of torch to the end of the interpreter, or to a forked child."""
    atexit.register(_leave_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for timeline in tuple(_open):
        timeline._leave()
