"""Letting go of what an exception holds: the locals of the frames that it came through.

Leaving ``except`` frees them only if nobody kept the exception; clearing its frames frees them
whoever did, without the garbage collector.
"""

from __future__ import annotations

import traceback
from typing import Any

from .._oom import chain_of

_TRACEBACK: Any = vars(BaseException)["__traceback__"]  # a subclass may shadow the name


def release(error: BaseException, outside: BaseException | None) -> None:
    """Clear the frames of an exception, of those it came of, and of members of groups.

    Call it after the ``except`` block that caught ``error``. Its traceback still tells the lines,
    and the frames in it hold nothing.

    Args:
        error: what was caught.
        outside: the exception that was handled when the work began; it, and what it came of,
            belongs to the caller and is left as it is.
    """
    for one in chain_of(error, outside):
        traceback.clear_frames(_TRACEBACK.__get__(one))


def forget_traceback(error: BaseException, outside: BaseException | None) -> None:
    """Detach the tracebacks too, which keep the frames of the callers once those have returned."""
    for one in chain_of(error, outside):
        BaseException.with_traceback(one, None)
