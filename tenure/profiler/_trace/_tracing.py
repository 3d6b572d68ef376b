"""Lines by ``sys.settrace``, for Python 3.11: one trace function more, above those that were there.

Invariant: whoever traced before (a debugger, coverage) gets every event that it would have got, and
is alone again afterwards. Threads that run already can't be reached; those that start later are.
"""

from __future__ import annotations

import dis
import sys
import threading
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from tenure._torch.autograd import ENGINE_CODE, check_engine_is_seen

from ._loops import has_loop
from ._sessions import TICKS_PER_TURN, Hub
from ._watches import Codes

Trace = Any  # as sys.gettrace gives it: a function of frame, event and argument
RETURNS = frozenset(dis.opmap[n] for n in ("RETURN_VALUE", "RETURN_CONST") if n in dis.opmap)
"""Instructions that end a call: only Python 3.12 and 3.13 have the second."""
_OPCODES_ARE_SWITCHED_ON_BY_SETTRACE = sys.version_info[:2] == (3, 12)
"""Whether a frame's wish for opcodes is granted from the next ``sys.settrace`` on, to all frames.

So one wish before that call makes those of ``_AfterCall`` come true.
"""


class Tracer:
    """Reports calls, lines and returns to a hub.

    Attributes:
        hub: whom it reports to.
        codes: what is watched.
        on: whether it is to report.
        thread_below: what traced threads that start, before.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.codes: Codes = {}
        self.on = False
        self.thread_below: Trace | None = None
        self._this_thread = _ThisThread(self)

    def start(self) -> None:
        """Trace this thread, the watched frames that run on it, and the threads to come."""
        check_engine_is_seen()
        self.on = True
        if _OPCODES_ARE_SWITCHED_ON_BY_SETTRACE:
            own = sys._getframe()
            wanted = own.f_trace_opcodes
            own.f_trace_opcodes = True
            own.f_trace_opcodes = wanted  # by who may trace this very frame
        self.thread_below = threading.gettrace()
        threading.settrace(self._first)
        self._this_thread.tracer.start(sys.gettrace())
        self._join_running()

    def join(self) -> None:
        """Trace this thread as well, unless something else does: that may hand on to us already."""
        if sys.gettrace() is None:
            self._this_thread.tracer.start(None)
            self._join_running()

    def stop(self) -> None:
        """Give way to who traced before, unless someone has come on top meanwhile.

        Other threads find out at their next event.
        """
        self.on = False
        self._this_thread.tracer.stop()
        if _is(threading.gettrace(), self._first):
            threading.settrace(self.thread_below)

    def watch(self, codes: Codes) -> None:
        """Report these codes."""
        came = codes.keys() - self.codes.keys()
        self.codes = codes
        if self.on and came:
            self._join_running()

    def _join_running(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame.f_code) in self.codes and not isinstance(frame.f_trace, _Local):
                frame.f_trace = _Local(self, frame.f_trace)
            frame = frame.f_back

    def _first(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The first event of a thread that starts: trace it as this thread is traced."""
        below = self.thread_below
        if not self.on:
            sys.settrace(below)
            return below(frame, event, arg) if below else None
        self.hub.tick()
        tracer = self._this_thread.tracer
        tracer.start(below)
        return tracer.trace(frame, event, arg)

    def report(self, frame: FrameType, event: str) -> None:
        """An event of a watched frame, other than a line."""
        if not self.on or id(frame.f_code) not in self.codes:
            self.hub.tick()
            return
        if event == "return":
            caller = frame.f_back
            # after a call by the engine the next instruction comes when all of it has run
            torn_down = _opcode(frame) in RETURNS and not _is_engine(caller)
            wanted = self.hub.leave(id(frame), frame.f_code, torn_down)
            if wanted and caller is not None:
                _AfterCall(self.hub, caller)
            elif wanted:
                self.hub.torn_down_now()


class _ThreadTracer:
    """The trace functions of one thread.

    Most calls and most lines that they get are nobody's: those are counted, and nothing more.
    """

    __slots__ = ("_below", "_count", "_hub", "_state", "_tracer")

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hub = tracer.hub
        self._state = tracer.hub.this_thread()
        self._below: Trace | None = None  # who traced before
        self._count = self.count  # made once

    def start(self, below: Trace | None) -> None:
        """Trace this thread, above who did before."""
        self._below = below
        sys.settrace(self.trace)

    def stop(self) -> None:
        """Give way to who traced before, unless someone has come on top meanwhile."""
        if _is(sys.gettrace(), self.trace):
            sys.settrace(self._below)

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call of whatever function."""
        tracer = self._tracer
        if not tracer.on:
            return self._trace_no_more(frame, event, arg)
        below = self._below
        if below is not None:
            below = self._trace_below(below, frame, event, arg)
        code = frame.f_code
        if id(code) in tracer.codes:
            self._hub.enter(id(frame), code, frame.f_lineno)
            return _Local(tracer, below)
        if code is ENGINE_CODE:
            self._hub.backward(+1)
            return _Backward(self._hub, below)
        state = self._state
        if not state.in_session:
            return below
        state.n_ticks += 1
        if state.n_ticks >= TICKS_PER_TURN:
            self._hub.turn()
        if not has_loop(code):
            return below
        return self._count if below is None else _Counting(self, below)

    def count(self, frame: FrameType, event: str, arg: Any) -> None:
        """An event of an unwatched frame; as a local trace function, it stays in place."""
        state = self._state
        state.n_ticks += 1
        if state.n_ticks >= TICKS_PER_TURN:
            self._hub.turn()

    def _trace_no_more(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call on a thread that has not heard of the end, or that another tracer hands on."""
        self._hub.tick()
        self.stop()
        return None if self._below is None else self._below(frame, event, arg)

    def _trace_below(self, trace: Trace, frame: FrameType, event: str, arg: Any) -> Any:
        local = trace(frame, event, arg)
        if not _is(sys.gettrace(), self.trace):  # some put themselves in place when called
            self.start(sys.gettrace())
        return local


class _ThisThread(threading.local):
    """The trace functions of the thread that asks."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = _ThreadTracer(tracer)


class _Local:
    """The local trace function of a watched frame, above another's."""

    __slots__ = ("_below", "_tracer")

    def __init__(self, tracer: Tracer, below: Trace | None) -> None:
        self._tracer = tracer
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Local:
        if self._below is not None:
            self._below = _forward(self._below, frame, event, arg)
        tracer = self._tracer
        code = frame.f_code
        if event == "line" and tracer.on and id(code) in tracer.codes:
            tracer.hub.line(id(frame), code, frame.f_lineno)
        else:
            tracer.report(frame, event)
        return self


class _Counting:
    """The local trace function of an unwatched frame that loops, above another's."""

    __slots__ = ("_below", "_tracer")

    def __init__(self, tracer: _ThreadTracer, below: Trace) -> None:
        self._tracer = tracer
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Counting:
        self._below = _forward(self._below, frame, event, arg)
        self._tracer.count(frame, event, arg)
        return self


class _Backward:
    """The local trace function of the frame that autograd's engine runs in."""

    __slots__ = ("_below", "_hub")

    def __init__(self, hub: Hub, below: Trace | None) -> None:
        self._hub = hub
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Backward:
        if self._below is not None:
            self._below = _forward(self._below, frame, event, arg)
        if event == "return":
            self._hub.backward(-1)
        return self


class _AfterCall:
    """The local trace function of a caller, until its next instruction."""

    __slots__ = ("_below", "_hub", "_opcodes")

    def __init__(self, hub: Hub, caller: FrameType) -> None:
        self._hub = hub
        self._below: Trace | None = caller.f_trace
        self._opcodes = caller.f_trace_opcodes
        caller.f_trace = self
        caller.f_trace_opcodes = True

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = self._opcodes
        frame.f_trace = self._below
        self._hub.torn_down_now()
        if self._below is None or (event == "opcode" and not self._opcodes):
            return None
        return self._below(frame, event, arg)


def _forward(below: Trace, frame: FrameType, event: str, arg: Any) -> Trace:
    """Hand an event on; as in the interpreter, None leaves the local function in place."""
    return below(frame, event, arg) or below


def _is(trace: Any, ours: Any) -> bool:
    return bool(trace == ours)  # bound methods are made anew each time


def _is_engine(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code is ENGINE_CODE


def _opcode(frame: FrameType) -> int:
    return _instructions(frame.f_code)[frame.f_lasti]


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> bytes:
    return code.co_code
