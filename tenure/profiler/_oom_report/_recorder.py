"""`record_oom`: a recorder that waits for the first out-of-memory error and explains it.

Invariant: the program goes on as without it. Its error is the same object, raised on; whatever
fails in here is told in the report, or nowhere.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self
from weakref import WeakKeyDictionary, ref

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tenure import _host_memory
from tenure._callers import user_site
from tenure._errors import ProfilerUsageError
from tenure._heap import collector_paused
from tenure._oom import OomInfo, chain_of, oom_info
from tenure._registries import handles_ooms
from tenure._reserve import Reserve

from ._causes import judge
from ._facts import Facts, gather
from ._notes import Notes
from ._report import OomReport, build
from ._scene import Scene, scene_of
from ._verdict import Verdict
from ._watch import Watch

_MOST_OF_TEXT = 400
_MOST_HANDLED, _MOST_LINES = 2, 8
_STEPS_WATCHED = 2
# What a look at a large heap takes, or as much of it as there is room for.
_RESERVES_BYTES = (64 << 20, 16 << 20, 4 << 20)


class _Aside:
    """A step that is not watched; it ends with the step, or with the arguments of its call."""

    def __init__(self, set_back: Callable[[], None]) -> None:
        self._thread_id = threading.get_ident()
        self._set_back: Callable[[], None] | None = set_back

    def end(self) -> None:
        """Watch again, once; nothing on another thread, because a mode is of one thread."""
        if threading.get_ident() == self._thread_id and self._set_back is not None:
            set_back, self._set_back = self._set_back, None
            set_back()

    def __del__(self) -> None:
        self.end()


class _Arguments(tuple[Any, ...]):
    """The arguments of such a step."""

    aside: _Aside


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
        self._n_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._steps = 0
        self._aside: ref[_Aside] | None = None
        self._last_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._by_error: dict[tuple[int, str], tuple[ref[BaseException] | None, OomReport]] = {}
        self._lines: set[str] = set()
        self._shown: OomReport | None = None
        self._lock = threading.Lock()
        self._reserve = Reserve(*_RESERVES_BYTES)
        self._notes = Notes()
        self._watch = Watch(self._saw, self._notes)
        self._is_open = True
        self._thread_id = threading.get_ident()
        self._hooks = (
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        )
        self._reserve.take()
        self._notes.open()
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
        self._notes.close()
        for hook in self._hooks:
            hook.remove()
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

    def _step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A step asks each parameter for tens of attributes, and a function mode is called for each:
        # in a small model that costs more than all else. The first steps are watched, for the state
        # is made there; a closure computes a loss, and is watched always.
        has_closure = len(args) > 1 or bool(kwargs)
        # of a step that raised an error which somebody keeps
        if self._aside is not None and (last := self._aside()) is not None:
            last.end()
        is_late = self._n_steps.get(optimizer, 0) >= _STEPS_WATCHED
        if not is_late or has_closure or not self._watch.set_aside():
            return None
        # torch calls no hook after a step that raises, but the arguments of its call are freed then
        arguments = _Arguments(args)
        arguments.aside = _Aside(self._set_back)
        self._aside = ref(arguments.aside)
        return arguments, kwargs

    def _step_ends(self, optimizer: Optimizer, args: tuple[Any, ...], _: Any) -> None:
        self._n_steps[optimizer] = self._n_steps.get(optimizer, 0) + 1
        self._steps += 1
        self._last_steps[optimizer] = self._steps
        if isinstance(args, _Arguments):
            args.aside.end()

    def _set_back(self) -> None:
        if self._is_open:
            self._watch.set_back()

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
        text = f"{info.chain[-1]}: {info.text[:_MOST_OF_TEXT]}"
        scene = Scene()
        facts = Facts(info, scene, info.device or "cpu", is_handled=frame is not None)
        with collector_paused():
            with suppress(Exception):
                scene = scene_of(error, frame, self._notes)
            with suppress(Exception):
                facts = gather(
                    info,
                    scene,
                    is_handled=frame is not None,
                    steps=self._steps,
                    last_steps=self._last_steps,
                    notes_of=self._notes,
                    began_bytes=self._began_bytes,
                )
        try:
            return build(facts, judge(facts), text)
        # the least that there is to say
        except Exception as failed:
            told = f"The cause could not be judged: {type(failed).__name__}."
            verdict = Verdict("unknown", 0, "Out of memory; nothing more could be seen.", (told,))
            return build(Facts(info, scene, facts.device), verdict, text)


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
    step of an optimizer; of Python, of NumPy and of other threads those that nobody handles. What
    `tenure.adaptive` tries again by itself is no news. From the third step of an optimizer on, its
    errors are seen where nobody handles them.

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
