"""Ctrl-C where it would leave something half done: it waits until that is done.

Invariant: in such a block a ``KeyboardInterrupt`` is raised only where it is let through. So none
comes between the moments at which a tensor is lent and noted as lent, or a model would stay without
its weights; and none between the vote of a rank and its gradients, or other ranks would wait.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

# past their enums, which cost more than all else that the end of a step does
_handler: Any = inspect.unwrap(signal.getsignal)
_set_handler: Any = inspect.unwrap(signal.signal)


class Interrupts:
    """Ctrl-C is kept from `keep` to `end`; as a block, from its beginning to its end."""

    def __init__(self) -> None:
        self._before: Any = None
        self._has_come = False

    def __enter__(self) -> Self:
        self.keep()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def keep(self) -> None:
        """Keep Ctrl-C from here on."""
        # other threads get none
        if threading.current_thread() is not threading.main_thread():
            return
        handler = _handler(signal.SIGINT)
        # what C code has set can't be put back
        if handler is not None and handler != self._note:
            self._before = handler
            _set_handler(signal.SIGINT, self._note)

    def end(self) -> None:
        """Let Ctrl-C through from here on, also one that has come before."""
        # a handler that the work has set stays
        if self._before is not None and _handler(signal.SIGINT) == self._note:
            _set_handler(signal.SIGINT, self._before)
        if self._has_come:
            self._has_come = False
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Return a block that Ctrl-C ends, also one that has come before."""
        try:
            self.end()
            yield
        finally:
            self.keep()

    def _note(self, *_: object) -> None:
        self._has_come = True
