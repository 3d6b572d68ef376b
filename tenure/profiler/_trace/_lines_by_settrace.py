"""Lines by ``sys.settrace``, for Python 3.11: one trace function more, above those that were there.

Invariant: whoever traced before (a debugger, coverage) gets every event that it would have got, and
is alone again afterwards. Threads that run already can't be reached; those that start later are.
"""

from __future__ import annotations

import dis
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tenure._torch.autograd import ENGINE_CODE, check_engine_is_seen

from ._booking import Codes
from ._sessions import TICKS_PER_TURN, Sessions
from ._trace import Trace

# As sys.gettrace gives it: a function of frame, event and argument.
TraceFunction = Any
RETURNS = frozenset(dis.opmap[n] for n in ("RETURN_VALUE", "RETURN_CONST") if n in dis.opmap)
"""Instructions that end a call: only Python 3.12 and 3.13 have the second."""
_OPCODES_ARE_SWITCHED_ON_BY_SETTRACE = sys.version_info[:2] == (3, 12)
"""Whether a frame's wish for opcodes is granted from the next ``sys.settrace`` on, to all frames.

So one wish before that call makes those of ``_AfterCall`` come true.
"""
# Python 3.11 has conditional jumps backward as well; from 3.12 on all of them are JUMP_BACKWARD.
_JUMPS_BACK = frozenset(
    op for name, op in dis.opmap.items() if name.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
)
_MAX_KNOWN_LOOPS = 4096
_known_loops: dict[int, tuple[CodeType, bool]] = {}
"""By identity, because the hash of a code takes long; each is held, so that none comes twice."""
_TORCH = str(Path(torch.__file__).parent)


class Tracer:
    """Reports calls, lines and returns to a trace.

    Attributes:
        trace: whom it reports to.
        codes: what is watched.
        on: whether it is to report.
        thread_below: what traced threads that start, before.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.codes: Codes = {}
        self.on = False
        self.thread_below: TraceFunction | None = None
        self._this_thread = _ThisThread(self)

    def start(self) -> None:
        """Trace this thread, the watched frames that run on it, and the threads to come."""
        check_engine_is_seen()
        self.on = True
        if _OPCODES_ARE_SWITCHED_ON_BY_SETTRACE:
            own = sys._getframe()
            wanted = own.f_trace_opcodes
            own.f_trace_opcodes = True
            # As it was wanted by who may trace this very frame.
            own.f_trace_opcodes = wanted
        # Threads first: one that starts from here on is not to be missed, and ticks meanwhile.
        self.thread_below = threading.gettrace()
        threading.settrace(self._first)
        self._this_thread.tracer.start(sys.gettrace())
        # A call is told by the thread's function, which the frames below here began without.
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
        # Before anything is taken away: what can't be, because someone came on top, sees this.
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
        self.trace.sessions.tick()
        tracer = self._this_thread.tracer
        tracer.start(below)
        return tracer.call(frame, event, arg)

    def report(self, frame: FrameType, event: str) -> None:
        """An event of a watched frame, other than a line."""
        if not self.on or id(frame.f_code) not in self.codes:
            self.trace.sessions.tick()
            return
        if event == "return":
            caller = frame.f_back
            # After a call by the engine the next instruction comes when all of it has run. And a
            # return is told on the way out of an exception too: then the traceback holds the frame.
            torn_down = _opcode(frame) in RETURNS and not _is_engine(caller)
            wanted = self.trace.leave(id(frame), frame.f_code, torn_down)
            if wanted and caller is not None:
                _AfterCall(self.trace, caller)
            elif wanted:
                self.trace.torn_down_now()


class _ThreadTracer:
    """The trace functions of one thread.

    Most calls and most lines that they get are nobody's: those are counted, and nothing more.
    """

    __slots__ = ("_below", "_count", "_sessions", "_state", "_trace", "_tracer")

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._trace = tracer.trace
        self._sessions: Sessions = tracer.trace.sessions
        self._state = self._sessions.threads.state
        # Who traced before.
        self._below: TraceFunction | None = None
        # Made once: a method is bound anew each time that it is asked for.
        self._count = self.count

    def start(self, below: TraceFunction | None) -> None:
        """Trace this thread, above who did before."""
        self._below = below
        sys.settrace(self.call)

    def stop(self) -> None:
        """Give way to who traced before, unless someone has come on top meanwhile."""
        if _is(sys.gettrace(), self.call):
            sys.settrace(self._below)

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call of whatever function."""
        tracer = self._tracer
        if not tracer.on:
            return self._call_no_more(frame, event, arg)
        below = self._below
        if below is not None:
            below = self._call_below(below, frame, event, arg)
        code = frame.f_code
        if id(code) in tracer.codes:
            self._trace.enter(id(frame), code, frame.f_lineno)
            return _Local(tracer, below)
        if code is ENGINE_CODE:
            self._trace.backward(+1)
            return _Backward(self._trace, below)
        # As Sessions.tick does, without its call: most calls of a program come through here.
        state = self._state
        if not state.in_session:
            return below
        state.n_ticks += 1
        if state.n_ticks >= TICKS_PER_TURN:
            self._sessions.turn()
        if not has_loop(code):
            return below
        return self._count if below is None else _Counting(self, below)

    def count(self, frame: FrameType, event: str, arg: Any) -> None:
        """An event of an unwatched frame; as a local trace function, it stays in place."""
        state = self._state
        state.n_ticks += 1
        if state.n_ticks >= TICKS_PER_TURN:
            self._sessions.turn()

    def _call_no_more(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call on a thread that has not heard of the end, or that another tracer hands on."""
        self._sessions.tick()
        self.stop()
        return None if self._below is None else self._below(frame, event, arg)

    def _call_below(self, below: TraceFunction, frame: FrameType, event: str, arg: Any) -> Any:
        local = below(frame, event, arg)
        # Some put themselves in place when they are called, as debuggers do to step.
        if not _is(sys.gettrace(), self.call):
            self.start(sys.gettrace())
        return local


class _ThisThread(threading.local):
    """The trace functions of the thread that asks."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = _ThreadTracer(tracer)


class _Local:
    """The local trace function of a watched frame, above another's."""

    __slots__ = ("_below", "_tracer")

    def __init__(self, tracer: Tracer, below: TraceFunction | None) -> None:
        self._tracer = tracer
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Local:
        if self._below is not None:
            self._below = _forward(self._below, frame, event, arg)
        tracer = self._tracer
        code = frame.f_code
        if event == "line" and tracer.on and id(code) in tracer.codes:
            tracer.trace.line(id(frame), code, frame.f_lineno)
        else:
            tracer.report(frame, event)
        return self


class _Counting:
    """The local trace function of an unwatched frame that loops, above another's."""

    __slots__ = ("_below", "_tracer")

    def __init__(self, tracer: _ThreadTracer, below: TraceFunction) -> None:
        self._tracer = tracer
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Counting:
        self._below = _forward(self._below, frame, event, arg)
        self._tracer.count(frame, event, arg)
        return self


class _Backward:
    """The local trace function of the frame that autograd's engine runs in."""

    __slots__ = ("_below", "_trace")

    def __init__(self, trace: Trace, below: TraceFunction | None) -> None:
        self._trace = trace
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Backward:
        if self._below is not None:
            self._below = _forward(self._below, frame, event, arg)
        if event == "return":
            self._trace.backward(-1)
        return self


class _AfterCall:
    """The local trace function of a caller, until its next instruction."""

    __slots__ = ("_below", "_opcodes", "_trace")

    def __init__(self, trace: Trace, caller: FrameType) -> None:
        self._trace = trace
        self._below: TraceFunction | None = caller.f_trace
        self._opcodes = caller.f_trace_opcodes
        caller.f_trace = self
        caller.f_trace_opcodes = True

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        # Put back before anything is booked: an error there must not leave this in place.
        frame.f_trace_opcodes = self._opcodes
        frame.f_trace = self._below
        self._trace.torn_down_now()
        if self._below is None or (event == "opcode" and not self._opcodes):
            return None
        return self._below(frame, event, arg)


def _forward(below: TraceFunction, frame: FrameType, event: str, arg: Any) -> TraceFunction:
    """Hand an event on; as in the interpreter, None leaves the local function in place."""
    return below(frame, event, arg) or below


def has_loop(code: CodeType) -> bool:
    """Whether an instruction of ``code`` jumps back, and it isn't torch's own.

    Only such code can run for long without calling anything; that of torch ends soon, or calls the
    program.
    """
    known = _known_loops.get(id(code))
    if known is None:
        if len(_known_loops) >= _MAX_KNOWN_LOOPS:
            _known_loops.clear()
        # Each instruction is two bytes, its number the first of them.
        jumps_back = not _JUMPS_BACK.isdisjoint(code.co_code[::2])
        is_programs = not code.co_filename.startswith(_TORCH)
        known = _known_loops[id(code)] = code, jumps_back and is_programs
    return known[1]


def _is(function: Any, ours: Any) -> bool:
    # By equality: bound methods are made anew each time.
    return bool(function == ours)


def _is_engine(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code is ENGINE_CODE


def _opcode(frame: FrameType) -> int:
    return _instructions(frame.f_code)[frame.f_lasti]


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> bytes:
    return code.co_code
