"""Lines by ``sys.monitoring``, for Python 3.12 and newer, on all threads.

Lines and returns are reported of watched codes alone. Calls and exceptions are reported of all code
while a profiler is enabled: some have to be, the others keep a session short. Other tools, and
``sys.settrace``, go on as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

from tenure._errors import ProfilerUsageError
from tenure._torch.autograd import ENGINE_CODE, check_engine_is_seen

from ._book import Codes
from ._engine import LineEngine

monitoring: Any = getattr(sys, "monitoring", None)
"""The module; None before Python 3.12."""

_NAME = "tenure.profiler"


class Monitor(LineEngine):
    """Reports lines and returns."""

    def __init__(self) -> None:
        super().__init__()
        self._tool: int | None = None
        events = monitoring.events
        self._lines = events.LINE | events.PY_RESUME | events.PY_RETURN | events.PY_YIELD
        self._callbacks = {
            events.LINE: self._line,
            events.PY_START: self._start,
            events.PY_RESUME: self._resume,
            events.PY_THROW: self._throw,
            events.PY_RETURN: self._return,
            events.PY_YIELD: self._yield,
            events.PY_UNWIND: self._unwind,
            events.INSTRUCTION: self._instruction,
        }

    def start(self) -> None:
        """See `LineEngine`: the events are those of all threads."""
        if self._tool is not None:
            return
        check_engine_is_seen()
        # 3 and 4 are the two that the interpreter has named for nobody; that of cProfile is last
        numbers = (3, 4, monitoring.OPTIMIZER_ID, monitoring.PROFILER_ID)
        tool = next((n for n in numbers if monitoring.get_tool(n) is None), None)
        if tool is None:
            raise ProfilerUsageError(
                "LineProfiler can't be enabled: other tools have taken every number of "
                "sys.monitoring. End one of them (a debugger, coverage or another profiler) first."
            )
        monitoring.use_tool_id(tool, _NAME)
        self._tool = tool
        # callbacks before events: from set_events on they come, in the midst of this function
        for event, callback in self._callbacks.items():
            monitoring.register_callback(tool, event, callback)
        events = monitoring.events
        # Of all code, because no Python lets exceptions be asked for of single codes, and a frame
        # that one has ended would else be thought to run on.
        monitoring.set_events(tool, events.PY_UNWIND | events.PY_THROW | events.PY_START)
        self._set(self.codes.values(), self._lines)

    def watch(self, before: Codes) -> None:
        """See `LineEngine`."""
        # its start has failed
        if self._tool is None:
            return
        gone = (code for i, code in before.items() if i not in self.codes)
        came = (code for i, code in self.codes.items() if i not in before)
        self._set(gone, monitoring.events.NO_EVENTS)
        self._set(came, self._lines)

    def stop(self) -> None:
        """See `LineEngine`."""
        tool, self._tool = self._tool, None
        if tool is not None:
            monitoring.set_events(tool, monitoring.events.NO_EVENTS)
            for event in self._callbacks:
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    def _set(self, codes: Iterable[CodeType], events: int) -> None:
        for code in codes:
            monitoring.set_local_events(self._tool, code, events)

    # --- callbacks: a frame's own stands just outside them

    def _start(self, code: CodeType, _: int) -> None:
        self.tick()

    # A generator may go on in the middle of a line, and then does something before the next.
    def _resume(self, code: CodeType, _: int) -> None:
        frame = sys._getframe(1)
        self.line(id(frame), code, frame.f_lineno, hits=0)

    def _throw(self, code: CodeType, _: int, __: BaseException) -> None:
        if id(code) in self.codes:
            frame = sys._getframe(1)
            self.line(id(frame), code, frame.f_lineno, hits=0)

    def _line(self, code: CodeType, line: int) -> None:
        self.line(id(sys._getframe(1)), code, line)

    def _yield(self, code: CodeType, _: int, __: object) -> None:
        self.leave(id(sys._getframe(1)), code, torn_down=False)

    def _unwind(self, code: CodeType, _: int, __: BaseException) -> None:
        if id(code) in self.codes:
            self.leave(id(sys._getframe(1)), code, torn_down=False)

    def _return(self, code: CodeType, _: int, __: object) -> None:
        frame = sys._getframe(1)
        caller = frame.f_back
        # after a call by autograd's engine the next instruction comes when all of it has run
        torn_down = caller is None or caller.f_code is not ENGINE_CODE
        if not self.leave(id(frame), code, torn_down):
            return
        if caller is None:
            self.torn_down_now()
            return
        # The variables are freed after this event and before the caller's next instruction; no
        # event stands nearer. It is asked for of the code, not of the frame: if another thread is
        # told instead, this one books with its next mark what it would have now.
        self._want_instructions(caller.f_code, True)

    def _instruction(self, code: CodeType, _: int) -> None:
        self._want_instructions(code, False)
        self.torn_down_now()

    def _want_instructions(self, code: CodeType, wanted: bool) -> None:
        instruction = monitoring.events.INSTRUCTION
        events = monitoring.get_local_events(self._tool, code) & ~instruction
        monitoring.set_local_events(self._tool, code, events | instruction * wanted)
