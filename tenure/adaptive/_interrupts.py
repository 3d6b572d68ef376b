"""Ctrl-C where it would leave something half done: it waits until that is done.

Invariant: in such a block a ``KeyboardInterrupt`` is raised only where it is let through. So none
comes between the moments at which a tensor is lent and noted as lent, or a model would stay without
its weights; and none between the vote of a rank and its gradients, or other ranks would wait.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

# The module below `signal`: that one makes an enum of each handler, which costs more than all else
# that the end of a step does.
_signals: Any = importlib.import_module("_signal")


class Interrupts:
    """Ctrl-C is kept from `keep` to `end`; as a block, from its beginning to its end."""

    _before: Any = None
    _has_come = False

    def keep(self) -> Self:
        """Keep Ctrl-C from here on."""
        # other threads get none
        if threading.current_thread() is threading.main_thread():
            handler = _signals.getsignal(signal.SIGINT)
            # what C code has set can't be put back
            if handler is not None and handler != self._note:
                self._before = handler
                _signals.signal(signal.SIGINT, self._note)
        return self

    def end(self, *_: object) -> None:
        """Let Ctrl-C through from here on, also one that has come before."""
        # a handler that the work has set stays
        if self._before is not None and _signals.getsignal(signal.SIGINT) == self._note:
            _signals.signal(signal.SIGINT, self._before)
        if self._has_come:
            self._has_come = False
            signal.raise_signal(signal.SIGINT)

    __enter__, __exit__ = keep, end

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
