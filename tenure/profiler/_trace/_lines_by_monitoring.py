"""Lines by ``sys.monitoring``, for Python 3.12 and newer, on all threads.

Invariant: lines and returns are reported of watched codes alone. Calls, jumps and exceptions are
reported of all code while a profiler is enabled, a callback each: some have to be, the others keep
a session short. Other tools, and ``sys.settrace``, go on as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

from tenure._torch.autograd import ENGINE_CODE, check_engine_is_seen

from ._booking import Codes
from ._lines_by_settrace import Tracer
from ._trace import Engine, Trace

monitoring: Any = getattr(sys, "monitoring", None)
"""The module; None before Python 3.12."""

_NAME = "tenure.profiler"
_engine = () if ENGINE_CODE is None else (ENGINE_CODE,)


def _free_tool() -> int | None:
    """A tool number that nobody uses, that of cProfile last; None where there is none."""
    # 3 and 4 are the two that the interpreter has named for nobody.
    numbers = (3, 4, monitoring.OPTIMIZER_ID, monitoring.PROFILER_ID)
    return next((n for n in numbers if monitoring.get_tool(n) is None), None)


class Monitor:
    """Reports calls, lines and returns to a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sessions = trace.sessions
        self._tool: int | None = None
        self._codes: Codes = {}
        self._on = False
        events = monitoring.events
        self._lines = (
            events.LINE | events.PY_START | events.PY_RESUME | events.PY_RETURN | events.PY_YIELD
        )
        self._callbacks = {
            events.LINE: self._line,
            events.PY_START: self._start,
            events.PY_RESUME: self._resume,
            events.PY_THROW: self._throw,
            events.PY_RETURN: self._return,
            events.PY_YIELD: self._yield,
            events.PY_UNWIND: self._unwind,
            events.JUMP: self._jump,
            events.INSTRUCTION: self._instruction,
        }

    def take_number(self) -> bool:
        """Become one of the interpreter's tools; False where others have all the numbers."""
        if self._tool is None:
            tool = _free_tool()
            if tool is None:
                return False
            monitoring.use_tool_id(tool, _NAME)
            self._tool = tool
        return True

    def start(self) -> None:
        """Report, under the number that was taken."""
        check_engine_is_seen()
        # Callbacks before events: from set_events on they come, in the midst of this function.
        for event, callback in self._callbacks.items():
            monitoring.register_callback(self._tool, event, callback)
        events = monitoring.events
        # Of all code, because no Python lets exceptions be asked for of single codes, and a frame
        # that one has ended would else be thought to run on.
        monitoring.set_events(
            self._tool, events.PY_UNWIND | events.PY_THROW | events.PY_START | events.JUMP
        )
        self._on = True
        # The beginnings of backward passes are among the calls of all code; their ends are not.
        self._set(_engine, events.PY_RETURN)
        self._set(self._codes.values(), self._lines)

    def join(self) -> None:
        """Do nothing: the events are those of all threads."""

    def stop(self) -> None:
        """Give the number back, if need be when the sessions of other threads have ended."""
        if self._tool is not None:
            self._set((*_engine, *self._codes.values()), monitoring.events.NO_EVENTS)
        self._on = False
        self._codes = {}
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        # A thread with a session needs ticks to end it, so its calls are reported until it has.
        if self._on or self._sessions.n_open or self._tool is None:
            return
        monitoring.set_events(self._tool, monitoring.events.NO_EVENTS)
        for event in self._callbacks:
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)
        self._tool = None

    def watch(self, codes: Codes) -> None:
        """Report these codes."""
        before, self._codes = self._codes, codes
        if self._on:
            gone = (code for i, code in before.items() if i not in codes)
            came = (code for i, code in codes.items() if i not in before)
            self._set(gone, monitoring.events.NO_EVENTS)
            self._set(came, self._lines)

    def _set(self, codes: Iterable[CodeType], events: int) -> None:
        for code in codes:
            monitoring.set_local_events(self._tool, code, events)

    # --- callbacks: a frame's own stands just outside them

    def _start(self, code: CodeType, _: int) -> None:
        if id(code) in self._codes:
            frame = sys._getframe(1)
            self._trace.enter(id(frame), code, frame.f_lineno)
        elif code is ENGINE_CODE:
            self._trace.backward(+1)
        else:
            self._tick()

    def _resume(self, code: CodeType, _: int) -> None:
        frame = sys._getframe(1)
        self._trace.enter(id(frame), code, frame.f_lineno)

    def _throw(self, code: CodeType, _: int, __: BaseException) -> None:
        if id(code) in self._codes:
            self._resume(code, 0)

    def _line(self, code: CodeType, line: int) -> None:
        self._trace.line(id(sys._getframe(1)), code, line)

    def _yield(self, code: CodeType, _: int, __: object) -> None:
        self._trace.leave(id(sys._getframe(1)), code, torn_down=False)

    def _unwind(self, code: CodeType, _: int, __: BaseException) -> None:
        if id(code) in self._codes:
            self._trace.leave(id(sys._getframe(1)), code, torn_down=False)
        elif code is ENGINE_CODE:
            self._trace.backward(-1)

    def _return(self, code: CodeType, _: int, __: object) -> None:
        if code is ENGINE_CODE:
            self._trace.backward(-1)
            return
        frame = sys._getframe(1)
        caller = frame.f_back
        # After a call by the engine the next instruction comes when all of it has run.
        torn_down = caller is None or caller.f_code is not ENGINE_CODE
        if not self._trace.leave(id(frame), code, torn_down):
            return
        if caller is None:
            self._trace.torn_down_now()
        else:
            # The variables are freed after this event and before the caller's next instruction;
            # no event stands nearer. It is asked for of the code, not of the frame: if another
            # thread is told instead, this one books with its next look what it would have now.
            events = monitoring.get_local_events(self._tool, caller.f_code)
            instruction = monitoring.events.INSTRUCTION
            monitoring.set_local_events(self._tool, caller.f_code, events | instruction)

    def _instruction(self, code: CodeType, _: int) -> None:
        events = monitoring.get_local_events(self._tool, code)
        instruction = monitoring.events.INSTRUCTION
        monitoring.set_local_events(self._tool, code, events & ~instruction)
        self._trace.torn_down_now()

    def _jump(self, _: CodeType, __: int, ___: int) -> None:
        self._tick()

    def _tick(self) -> None:
        self._sessions.tick()
        if not self._on:
            self._free_if_idle()


class _Either:
    """Monitoring, unless other tools have taken every number when the first listener is opened."""

    def __init__(self, trace: Trace) -> None:
        self._monitor = Monitor(trace)
        self._tracer = Tracer(trace)
        self._chosen: Engine = self._tracer

    def start(self) -> None:
        self._chosen = self._monitor if self._monitor.take_number() else self._tracer
        self._chosen.start()

    def join(self) -> None:
        self._chosen.join()

    def watch(self, codes: Codes) -> None:
        # Both, because the first codes come before one of them is chosen.
        self._monitor.watch(codes)
        self._tracer.watch(codes)

    def stop(self) -> None:
        self._chosen.stop()


def best_engine(trace: Trace) -> Engine:
    """Tracing, on a Python without ``sys.monitoring``."""
    return Tracer(trace) if monitoring is None else _Either(trace)


the_trace = Trace(best_engine)
"""Where all listeners of a process are opened. Making it starts nothing."""
