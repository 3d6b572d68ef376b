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

from tenure._torch_backward import ENGINE_CODE

from ._hub import Hub
from ._loops import has_loop
from ._watches import Codes

Trace = Any  # as sys.gettrace gives it: a function of frame, event and argument
RETURNS = frozenset(dis.opmap[n] for n in ("RETURN_VALUE", "RETURN_CONST") if n in dis.opmap)
"""Instructions that end a call: only Python 3.12 and 3.13 have the second."""


class Tracer:
    """Reports calls, lines and returns to a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._codes: Codes = {}
        self._on = False
        self._below = _Below()
        self._thread_below: Trace | None = None

    def start(self) -> None:
        """Trace this thread, the watched frames that run on it, and the threads to come."""
        self._on = True
        self._below.trace = sys.gettrace()
        self._thread_below = threading.gettrace()
        threading.settrace(self._first)
        sys.settrace(self._trace)
        self._join_running()

    def join(self) -> None:
        """Trace this thread as well, unless something else does: that may hand on to us already."""
        if sys.gettrace() is None:
            self._below.trace = None
            sys.settrace(self._trace)
            self._join_running()

    def stop(self) -> None:
        """Give way to who traced before, unless someone has come on top meanwhile.

        Other threads find out at their next event.
        """
        self._on = False
        if _is(sys.gettrace(), self._trace):
            sys.settrace(self._below.trace)
        if _is(threading.gettrace(), self._first):
            threading.settrace(self._thread_below)

    def watch(self, codes: Codes) -> None:
        """Report these codes."""
        came = codes.keys() - self._codes.keys()
        self._codes = codes
        if self._on and came:
            self._join_running()

    def _join_running(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame.f_code) in self._codes and not isinstance(frame.f_trace, _Local):
                frame.f_trace = _Local(self, frame.f_trace)
            frame = frame.f_back

    def _first(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The first event of a thread that starts: trace it as this thread is traced."""
        self._below.trace = self._thread_below
        if not self._on:
            sys.settrace(self._thread_below)
            return self._thread_below(frame, event, arg) if self._thread_below else None
        sys.settrace(self._trace)
        return self._trace(frame, event, arg)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call of whatever function."""
        below = self._below.trace
        if not self._on:
            return self._trace_no_more(frame, event, arg)
        if below is not None:
            below = self._trace_below(below, frame, event, arg)
        code = frame.f_code
        if id(code) in self._codes:
            self._hub.enter(id(frame), code, frame.f_lineno)
            return _Local(self, below)
        if code is ENGINE_CODE:
            self._hub.backward(+1)
            return _Backward(self._hub, below)
        if self._hub.tick() and has_loop(code):
            return _Ticking(self._hub, below)
        return below

    def _trace_no_more(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call on a thread that has not heard of the end, or that another tracer hands on."""
        self._hub.tick()
        below = self._below.trace
        if _is(sys.gettrace(), self._trace):
            sys.settrace(below)
        return None if below is None else below(frame, event, arg)

    def _trace_below(self, trace: Trace, frame: FrameType, event: str, arg: Any) -> Any:
        local = trace(frame, event, arg)
        if not _is(sys.gettrace(), self._trace):  # some put themselves in place when called
            self._below.trace = sys.gettrace()
            sys.settrace(self._trace)
        return local

    def report(self, frame: FrameType, event: str) -> None:
        """An event of a watched frame."""
        if not self._on or id(frame.f_code) not in self._codes:
            self._hub.tick()
            return
        if event == "line":
            self._hub.line(id(frame), frame.f_code, frame.f_lineno)
        elif event == "return":
            caller = frame.f_back
            # after a call by the engine the next instruction comes when all of it has run
            torn_down = _opcode(frame) in RETURNS and not _is_engine(caller)
            wanted = self._hub.leave(id(frame), frame.f_code, torn_down)
            if wanted and caller is not None:
                _AfterCall(self._hub, caller)
            elif wanted:
                self._hub.torn_down_now()


class _Local:
    """The local trace function of a watched frame, above another's."""

    __slots__ = ("_below", "_tracer")

    def __init__(self, tracer: Tracer, below: Trace | None) -> None:
        self._tracer = tracer
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Local:
        if self._below is not None:
            self._below = _forward(self._below, frame, event, arg)
        self._tracer.report(frame, event)
        return self


class _Ticking:
    """The local trace function of an unwatched frame that loops."""

    __slots__ = ("_below", "_hub")

    def __init__(self, hub: Hub, below: Trace | None) -> None:
        self._hub = hub
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Ticking:
        if self._below is not None:
            self._below = _forward(self._below, frame, event, arg)
        self._hub.tick()
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


class _Below(threading.local):
    """Who traced a thread before."""

    trace: Trace | None = None


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
