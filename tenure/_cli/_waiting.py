"""Lines on a terminal while a command works on something that shows nothing by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

_PATIENCE_S = 2.0


@contextmanager
def waiting(label: str) -> Iterator[Callable[[str], None]]:
    """A block that says what it does once it has taken two seconds, in lines that stay.

    From a thread, because one prediction may take minutes. Each line comes after twice the time of
    the one before. Only where the standard error is a terminal, and ``TENURE_PROGRESS`` is not 0.

    Args:
        label: what the command is about.

    Yields:
        What is to be called as each part begins, with what it is.
    """
    parts = ["begins"]
    if not _is_wanted():
        yield parts.append
        return
    is_done = Event()

    def tell() -> None:
        elapsed_s, patience_s = 0.0, _PATIENCE_S
        while not is_done.wait(patience_s):
            elapsed_s += patience_s
            patience_s = elapsed_s
            print(f"tenure: {label}: {parts[-1]} ({elapsed_s:.0f} s)", file=sys.__stderr__)

    # a daemon: what the work waits for must not keep the process
    thread = Thread(target=tell, name=f"tenure {label}", daemon=True)
    thread.start()
    try:
        yield parts.append
    finally:
        is_done.set()
        thread.join()


def _is_wanted() -> bool:
    # tenure._show asks the same, and imports torch, which alone may take as long
    return os.environ.get("TENURE_PROGRESS") != "0" and bool(
        sys.stderr is not None and sys.stderr.isatty()
    )
