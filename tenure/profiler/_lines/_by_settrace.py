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

from ._book import Codes
from ._engine import TICKS_PER_TURN, Engine, Thread

# As sys.gettrace gives it: a function of frame, event and argument.
TraceFunction = Any
_RETURN = dis.opmap["RETURN_VALUE"]
_JUMPS_BACK = frozenset(
    op for name, op in dis.opmap.items() if name.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
)
_TORCH = str(Path(torch.__file__).parent)
_MOST_KNOWN = 4096


class Tracer(Engine):
    """Reports calls, lines and returns."""

    def __init__(self) -> None:
        super().__init__()
        self._thread_below: TraceFunction | None = None
        # by identity, because the hash of a code takes long; each is held, so that none comes twice
        self._loops: dict[int, tuple[CodeType, bool]] = {}

    def start(self) -> None:
        """Trace this thread, the watched frames that run on it, and the threads to come."""
        check_engine_is_seen()
        self.on = True
        # threads first: one that starts from here on is not to be missed, and ticks meanwhile
        self._thread_below = threading.gettrace()
        threading.settrace(self._first)
        self._trace_this_thread(sys.gettrace())

    def join(self) -> None:
        """Trace this thread as well, unless something else does: that may hand on to us already."""
        if sys.gettrace() is None:
            self._trace_this_thread(None)

    def watch(self, before: Codes) -> None:
        """See `Engine`."""
        if self.codes.keys() - before.keys():
            self._join_running()

    def stop(self) -> None:
        """Give way to who traced before, unless someone has come on top meanwhile.

        Other threads find out at their next event.
        """
        # before anything is taken away: what can't be, because someone came on top, sees this
        self.on = False
        self._tracer.stop()
        if threading.gettrace() == self._first:
            threading.settrace(self._thread_below)

    def has_loop(self, code: CodeType) -> bool:
        """Whether an instruction of ``code`` jumps back, and it isn't torch's own.

        Only such code can run for long without calling anything; that of torch ends soon, or calls
        the program.
        """
        known = self._loops.get(id(code))
        if known is None:
            if len(self._loops) >= _MOST_KNOWN:
                self._loops.clear()
            # each instruction is two bytes, its number the first of them
            jumps_back = not _JUMPS_BACK.isdisjoint(code.co_code[::2])
            found = jumps_back and not code.co_filename.startswith(_TORCH)
            known = self._loops[id(code)] = code, found
        return known[1]

    def report(self, frame: FrameType, event: str) -> None:
        """An event of a frame that is traced."""
        code = frame.f_code
        if not self.on or id(code) not in self.codes:
            self.tick()
        elif event == "line":
            self.line(id(frame), code, frame.f_lineno)
        elif event == "return":
            caller = frame.f_back
            # After a call by autograd's engine the next instruction comes when all of it has run.
            # And a return is told on the way out of an exception, too: then the traceback holds
            # the frame.
            torn_down = _instructions(code)[frame.f_lasti] == _RETURN and (
                caller is None or caller.f_code is not ENGINE_CODE
            )
            if self.leave(id(frame), code, torn_down):
                if caller is None:
                    self.torn_down_now()
                else:
                    _AfterCall(self, caller)
        else:
            self.tick()

    @property
    def _tracer(self) -> _ThreadTracer:
        """The trace functions of the thread that asks."""
        thread = self.thread
        found: _ThreadTracer = thread.tracer or _ThreadTracer(self, thread)
        thread.tracer = found
        return found

    def _trace_this_thread(self, below: TraceFunction | None) -> _ThreadTracer:
        tracer = self._tracer
        tracer.start(below)
        # a call is told by the thread's function, which the frames below here began without
        self._join_running()
        return tracer

    def _join_running(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame.f_code) in self.codes and not isinstance(frame.f_trace, _Local):
                frame.f_trace = _Local(self, frame.f_trace)
            frame = frame.f_back

    def _first(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The first event of a thread that starts: trace it as this thread is traced."""
        self.tick()
        return self._trace_this_thread(self._thread_below).call(frame, event, arg)


class _ThreadTracer:
    """The trace functions of one thread, above who traced before.

    Most calls and most lines that they get are nobody's: those are counted, and nothing more.
    """

    def __init__(self, tracer: Tracer, thread: Thread) -> None:
        self._tracer = tracer
        self._thread = thread
        self._below: TraceFunction | None = None
        # made once: a method is bound anew each time that it is asked for
        self._count = self.count

    def start(self, below: TraceFunction | None) -> None:
        """Trace this thread, above who did before."""
        self._below = below
        sys.settrace(self.call)

    def stop(self) -> None:
        """Give way to who traced before, unless someone has come on top meanwhile."""
        if sys.gettrace() == self.call:
            sys.settrace(self._below)

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call of whatever function."""
        tracer, below = self._tracer, self._below
        if not tracer.on:
            # on a thread that has not heard of the end, or that another tracer hands on
            tracer.tick()
            self.stop()
            return None if below is None else below(frame, event, arg)
        if below is not None:
            below = below(frame, event, arg)
            # some put themselves in place when they are called, as debuggers do to step
            if sys.gettrace() != self.call:
                self._below = sys.gettrace()
                sys.settrace(self.call)
        code = frame.f_code
        if id(code) in tracer.codes:
            tracer.enter(id(frame), code, frame.f_lineno)
            return _Local(tracer, below)
        if not self._thread.follows:
            return below
        self.count(frame, event, arg)
        if not tracer.has_loop(code):
            return below
        return self._count if below is None else _Local(tracer, below)

    def count(self, frame: FrameType, event: str, arg: Any) -> None:
        """An event of an unwatched frame; as a local trace function, it stays in place."""
        # as Engine.tick does, without its call: most events of a program come through here
        thread = self._thread
        thread.n_ticks += 1
        if thread.n_ticks >= TICKS_PER_TURN and thread.follows:
            self._tracer.turn(thread)


class _Local:
    """The local trace function of a frame, above another's."""

    __slots__ = ("_below", "_tracer")

    def __init__(self, tracer: Tracer, below: TraceFunction | None) -> None:
        self._tracer = tracer
        self._below = below

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Local:
        if self._below is not None:
            # as in the interpreter, None leaves the local function in place
            self._below = self._below(frame, event, arg) or self._below
        self._tracer.report(frame, event)
        return self


class _AfterCall:
    """The local trace function of a caller, until its next instruction."""

    __slots__ = ("_below", "_engine", "_opcodes")

    def __init__(self, engine: Engine, caller: FrameType) -> None:
        self._engine = engine
        self._below: TraceFunction | None = caller.f_trace
        self._opcodes = caller.f_trace_opcodes
        caller.f_trace = self
        caller.f_trace_opcodes = True

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        # put back before anything is booked: an error there must not leave this in place
        frame.f_trace_opcodes = self._opcodes
        frame.f_trace = self._below
        self._engine.torn_down_now()
        if self._below is None or (event == "opcode" and not self._opcodes):
            return None
        return self._below(frame, event, arg)


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> bytes:
    return code.co_code
