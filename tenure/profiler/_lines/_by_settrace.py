"""Lines by ``sys.settrace``, for Python 3.11: beside no other tracer, such as a debugger.

Threads that run already can't be reached; those that start later are.
"""

from __future__ import annotations

import dis
import sys
import threading
from types import FrameType
from typing import Any

from tenure._errors import ProfilerUsageError
from tenure._torch.autograd import ENGINE_CODE, check_engine_is_seen

from ._book import Codes
from ._engine import LineEngine
from ._targets import SUSPENDS

_RETURN = dis.opmap["RETURN_VALUE"]


class Tracer(LineEngine):
    """Reports lines and returns."""

    def start(self) -> None:
        """Trace this thread, the watched frames that run on it, and the threads to come."""
        if threading.gettrace() != self._call:
            check_engine_is_seen()
            if sys.gettrace() is not None or threading.gettrace() is not None:
                raise ProfilerUsageError(
                    "LineProfiler can't be enabled beside a debugger or coverage on Python 3.11, "
                    "where sys.settrace has room for one of them. End it first, or use Python 3.12 "
                    "or newer."
                )
            # threads first: one that starts from here on is not to be missed, and ticks meanwhile
            threading.settrace(self._call)
        # another thread joins, unless something else traces it
        if sys.gettrace() in (None, self._call):
            sys.settrace(self._call)
            self.watch({})

    def watch(self, before: Codes) -> None:
        """Trace the watched frames that run on this thread; others begin with a call."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame.f_code) in self.codes and frame.f_trace is None:
                frame.f_trace = self._local_event
            frame = frame.f_back

    def stop(self) -> None:
        """Trace no more; other threads find out at their next call."""
        if sys.gettrace() == self._call:
            sys.settrace(None)
        if threading.gettrace() == self._call:
            threading.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Return a call of whatever function."""
        if not self.on:
            sys.settrace(None)
            return None
        code = frame.f_code
        if id(code) not in self.codes:
            self.tick()
            return None
        # A generator may go on in the middle of a line, and then does something before the next.
        if code.co_flags & SUSPENDS:
            self.line(id(frame), code, frame.f_lineno, hits=0)
        return self._local_event

    def _local_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Return an event of a frame that was watched when it began."""
        code = frame.f_code
        if id(code) not in self.codes:
            self.tick()
        elif event == "line":
            self.line(id(frame), code, frame.f_lineno)
        elif event == "return":
            caller = frame.f_back
            # After a call by autograd's engine the next instruction comes when all of it has run.
            # And a return is told on the way out of an exception, too: then the traceback holds
            # the frame.
            is_by_engine = caller is not None and caller.f_code is ENGINE_CODE
            torn_down = code.co_code[frame.f_lasti] == _RETURN and not is_by_engine
            if self.leave(id(frame), code, torn_down):
                if caller is None:
                    self.torn_down_now()
                else:
                    self._tell_next_instruction(caller)
        return self._local_event

    def _tell_next_instruction(self, caller: FrameType) -> None:
        local: Any = caller.f_trace

        def next_instruction(frame: FrameType, event: str, arg: Any) -> Any:
            frame.f_trace, frame.f_trace_opcodes = local, False
            self.torn_down_now()
            return local if local is None or event == "opcode" else local(frame, event, arg)

        caller.f_trace, caller.f_trace_opcodes = next_instruction, True
