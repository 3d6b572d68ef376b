"""Signals that end a process without its exit handlers: the recording is written before.

A program that handles such a signal itself does so; then this is not called. In a long call of C it
comes later, as Ctrl-C does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_NAMES = ("SIGTERM", "SIGHUP")
_INTERRUPT = signal.SIGINT


class Deaths:
    """Tells of a signal that is about to end the process, and then lets it.

    Args:
        told: is called with its number.
    """

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told = told
        self._handled: list[signal.Signals] = []
        self._masks = threading.local()

    def begin(self) -> None:
        """Handle those that would end the process now; one that is ignored stays so."""
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handle)
                self._handled.append(number)

    def before_fork(self) -> None:
        """Let none come to a child that has the handler still; it would be lost there."""
        if self._handled:
            self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)

    def after_fork(self) -> None:
        """Let them come again; in a child, after `end`."""
        before = self._masks.__dict__.pop("before", None)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end(self) -> None:
        """Let them do what they did, where the program has not said otherwise."""
        for number in self._handled:
            with suppress(ValueError):
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let none come in a block on the main thread; those that end the process come after it.

        Ctrl-C is dropped: the program has ended. A mask would not do, for a signal is handled here
        also where it was delivered to another thread.
        """
        came, before = list[int](), dict[int, Any]()
        for name in (_INTERRUPT.name, *_NAMES):
            number = getattr(signal, name, None)
            handler = None if number is None else signal.getsignal(number)
            if number is not None and handler not in (None, signal.SIG_IGN):
                before[number] = handler
                signal.signal(number, lambda number, _: came.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for number in dict.fromkeys(came):
                if number != _INTERRUPT:
                    os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._told(number)
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
