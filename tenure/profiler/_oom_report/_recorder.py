"""`record_oom`: a recorder that waits for the first out-of-memory error and explains it.

Invariant: the program goes on as without it. Its error is the same object, raised on; whatever
fails in here is told in the report, or nowhere.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn, Self
from weakref import ref

from tenure import _host_memory
from tenure._callers import user_site
from tenure._errors import ProfilerUsageError
from tenure._heap import collector_paused
from tenure._oom import OomInfo, chain_of, oom_info
from tenure._registries import handles_ooms
from tenure._reserve import Reserve

from ._causes import judge
from ._facts import Facts
from ._kinds import Verdict
from ._report import OomReport, build
from ._watch import Notes, Watch

_MOST_HANDLED, _MOST_LINES = 2, 8
# What a look at a large heap takes, or as much of it as there is room for.
_RESERVES_BYTES = (64 << 20, 16 << 20, 4 << 20)


class OomRecorder:
    """Waits for an out-of-memory error from the moment that it is made; see `record_oom`.

    Attributes:
        reports: of the first error; and of the last that was explained, if it is another one.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.reports: tuple[OomReport, ...] = ()
        self._quiet = quiet
        self._began_bytes = _host_memory.resident_bytes()
        self._opened_at = str(user_site())
        self._by_error: dict[tuple[int, str], tuple[ref[BaseException] | None, OomReport]] = {}
        self._lines: set[str] = set()
        self._shown: OomReport | None = None
        self._lock = threading.Lock()
        self._reserve = Reserve(*_RESERVES_BYTES)
        self._noted = Notes()
        self._watch = Watch(self._saw, self._noted)
        self._is_open = True
        self._thread_id = threading.get_ident()
        self._reserve.take()
        self._watch.open()

    @property
    def report(self) -> OomReport | None:
        """The last report, which says why the program or the block ended, if an error did.

        None as long as memory has not run out.
        """
        return self.reports[-1] if self.reports else None

    def close(self) -> None:
        """Stop waiting; a second time does nothing.

        Raises:
            ProfilerUsageError: on another thread than it was opened on; nothing changes.
        """
        if not self._is_open:
            return
        if self._thread_id != threading.get_ident():
            raise ProfilerUsageError(
                f"{self!r} was closed on another thread than it was opened on, and stays open. "
                "Close it where it was opened."
            )
        self._is_open = False
        self._watch.close()
        self._reserve.free()

    def __enter__(self) -> Self:
        """Wait to the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop waiting; the block's error, if it is one of memory, is explained, and goes on."""
        if error is not None:
            self._saw(error, True)
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        found = f", {self.report.cause}" if self.report is not None else ""
        return f"<OomRecorder opened at {self._opened_at}, {state}{found}>"

    def __reduce__(self) -> NoReturn:
        raise ProfilerUsageError(
            f"{self!r} can't be copied or pickled: it belongs to one program. Keep its report, "
            "which can."
        )

    def _saw(self, error: BaseException, is_final: bool) -> None:
        """Explain an error, if it is one of memory and news."""
        if self._reports_enough(is_final) or not self._lock.acquire(blocking=False):
            return
        try:
            info = oom_info(error)
            if info is not None:
                self._note(error, info, None if is_final else sys._getframe(1))
        # Memory is short, and the program's objects are any: its own error is what matters.
        except Exception:
            return
        finally:
            self._lock.release()

    def _reports_enough(self, is_final: bool) -> bool:
        if not self._is_open or is_final:
            return not self._is_open
        if handles_ooms.get() or len(self._lines) >= _MOST_LINES:
            return True
        # A program may handle thousands of a line: whoever looks for a size that fits does.
        return len(self._by_error) >= _MOST_HANDLED and str(user_site()) in self._lines

    def _note(self, error: BaseException, info: OomInfo, frame: FrameType | None) -> None:
        """Keep the report of the first error, and of the last: what ends the program may be it.

        What happened is best told as it was raised. So the second of a line is explained as well: a
        retry in the midst of the handling of the first; see
        test_an_error_that_ends_the_program_is_explained_beside_the_first.
        """
        key = _key_of(error)
        known, report = self._by_error.get(key, (None, None))
        # its address may be that of another one by now
        if report is None or (known is not None and known() is None):
            if frame is not None:
                self._lines.add(str(user_site()))
            self._reserve.free()
            try:
                report = self._report_of(error, info, frame)
            finally:
                self._reserve.take()
            self._by_error[key] = _reference_to(error), report
        is_told = frame is None or not self.reports
        self.reports = tuple({id(each): each for each in (*self.reports[:1], report)}.values())
        if is_told:
            if not self._quiet and self._shown is not report:
                _show(report)
            self._shown = report

    def _report_of(self, error: BaseException, info: OomInfo, frame: FrameType | None) -> OomReport:
        is_handled = frame is not None
        facts = Facts(info, self._noted, self._began_bytes, is_handled)
        with collector_paused():
            try:
                facts.look(error, frame)
                return build(facts, judge(facts))
            # the least that there is to say
            except Exception as failed:
                told = f"The cause could not be judged: {type(failed).__name__}."
                head = "Out of memory; nothing more could be seen."
                return build(facts, Verdict("unknown", 0, head, (told,)))


def _key_of(error: BaseException) -> tuple[int, str]:
    """The error of memory in a chain, so that it is known again below what was raised from it."""
    for each in chain_of(error):
        info = oom_info(each)
        if info is not None and len(info.chain) == 1:
            return id(each), info.text
    return id(error), ""


def _reference_to(error: BaseException) -> ref[BaseException] | None:
    """One that keeps nothing; None of Python's own MemoryError, which has none."""
    try:
        return ref(error)
    except TypeError:
        return None


def _show(report: OomReport) -> None:
    stream = sys.stderr
    if stream is not None:
        rule = "-" * 80
        stream.write(f"{rule}\n{report}\n{rule}\n")
        stream.flush()


def record_oom(*, quiet: bool = False) -> OomRecorder:
    """Explain the first out-of-memory error, at the moment that it is raised.

    Called alone it waits until the program ends; with ``with`` to the end of the block. An error
    that the program handles is seen as well, while all that it was about is still alive. On the
    thread that calls this every error that torch raises is seen, also in a backward pass and in the
    step of an optimizer; of Python, of NumPy and of other threads those that nobody handles.
    Errors after which `tenure.adaptive` tries again by itself are left out.

    Waiting costs one or two microseconds a call of torch, and address space (64 MiB, never touched)
    that the report is made in.

    Args:
        quiet: whether nothing is printed; otherwise the report goes to stderr.

    Returns:
        The recorder; its ``report`` is an `OomReport`, or None.

    Example:
        >>> import torch
        >>> from tenure.adaptive import memory_budget
        >>> from tenure.profiler import record_oom
        >>> def evaluate():
        ...     kept = []
        ...     while True:
        ...         kept.append(torch.ones(64, 1024))
        >>> with record_oom(quiet=True) as recorder, memory_budget("8MiB"):
        ...     try:
        ...         evaluate()
        ...     except torch.OutOfMemoryError:
        ...         pass
        >>> recorder.report.device, recorder.report.total_bytes  # and why, in .first_line
        ('cpu', 8388608)
    """
    return OomRecorder(quiet=quiet)
