"""Who sees an error first: before the program handles it, and while its frames are alive.

A function mode of torch stands around each call of torch on its thread, those of a backward pass
and of an optimizer among them. What is raised elsewhere (by Python itself, by NumPy, on another
thread) is seen where nobody handles it.

Invariant: an error goes on as the same object, whatever is done about it here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch.overrides import TorchFunctionMode, handle_torch_function

from tenure._callers import module_of, stand_in
from tenure._torch.compiler import is_dynamo_compiling, never_compiled
from tenure._torch.modes import push_lowest, remove

from ._notes import NOTED, Notes

_OURS = "tenure.profiler._"
_FOR_PYTHON = handle_torch_function.__code__
Tell = Callable[[BaseException, bool], None]
"""Is told of each error, and whether nobody handles it; raises nothing."""


class ErrorMode(TorchFunctionMode):
    """Tells of each error that a function of torch raises on this thread.

    Args:
        tell: is told.
        notes: gets what goes on from step to step.
    """

    def __init__(self, tell: Tell, notes: Notes) -> None:
        super().__init__()
        self._tell = tell
        self._notes = notes

    @never_compiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; a block that catches costs nothing while nothing is raised."""
        # dynamo folds this, and must trace nothing of what follows
        if is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        # a function of torch in Python, whose warnings are about what called it
        if caller.f_code is _FOR_PYTHON and caller.f_back and caller.f_back.f_back:
            caller = caller.f_back.f_back
        try:
            result = stand_in(caller)(func, args, kwargs)
        except Exception as error:
            self._tell(error, False)
            # the program may print it; a bare raise adds no frame
            error.__traceback__ = _below_us(error.__traceback__)
            raise
        if id(func) in NOTED:
            with suppress(Exception):
                self._notes.note(func, args, kwargs, result)
        return result


def _below_us(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and module_of(frames.tb_frame).startswith(_OURS):
        frames = frames.tb_next
    return frames


class Watch:
    """Tells of errors from `open` to `close`, the first of which comes on the thread that opens.

    Args:
        tell: is told.
        notes: gets what goes on from step to step.
    """

    def __init__(self, tell: Tell, notes: Notes) -> None:
        self._tell = tell
        self._mode = ErrorMode(tell, notes)
        self._hook: Any = None
        self._thread_hook: Any = None

    def open(self) -> None:
        """Begin."""
        push_lowest(self._mode)
        self._hook, self._thread_hook = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._excepthook, self._in_thread

    def close(self) -> None:
        """End. A hook that was set after ours calls ours, which then only calls the one before."""
        remove(self._mode)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        if threading.excepthook == self._in_thread:
            threading.excepthook = self._thread_hook

    def set_aside(self) -> bool:
        """Stop seeing what torch raises on this thread; False where it was not seen."""
        return remove(self._mode)

    def set_back(self) -> None:
        """See it again."""
        push_lowest(self._mode)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._tell(error, True)
        self._hook(kind, error, traceback)

    def _in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            self._tell(args.exc_value, True)
        self._thread_hook(args)
