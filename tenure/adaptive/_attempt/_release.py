"""Letting go of what an exception holds: the locals of the frames that it came through.

Leaving ``except`` frees them only if nobody kept the exception; clearing its frames frees them
whoever did, without the garbage collector.

Invariant: only frames that have ended are cleared. Clearing a generator that is suspended closes
it, and one of the caller's, that an older part of the traceback leads through, would silently give
no more items.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tenure._oom import chain_of

# The interpreter's own slot: a subclass may shadow the name, with a property that raises.
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_CAN_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def release(error: BaseException, outside: BaseException | None) -> None:
    """Clear the frames of an exception, of those it came of, and of members of groups.

    Call it after the ``except`` block that caught ``error``. Its traceback still tells the lines,
    and the frames in it that have ended hold nothing.

    A suspended generator or coroutine in it belongs to whoever can still continue it. If those
    were only frames of the attempt, it ends when they are cleared, and is cleared after them. If
    somebody else holds it, it was there before the attempt or was handed out, and stays as it is.

    Args:
        error: what was caught.
        outside: the exception that was handled when the work began; it, and what it came of,
            belongs to the caller and is left as it is.
    """
    waiting = [frame for one in chain_of(error, outside) for frame in _frames_of(one)]
    n_before = -1
    # A frame that is cleared may have held the last reference to a generator, which ends with it
    # and can be cleared in the next round: see
    # test_a_generator_that_only_the_attempt_held_lets_go_of_its_variables.
    while len(waiting) != n_before:
        n_before = len(waiting)
        waiting = [frame for frame in waiting if not _clear(frame)]


def forget_traceback(error: BaseException, outside: BaseException | None) -> None:
    """Detach the tracebacks too, which keep the frames of the callers once those have returned."""
    for one in chain_of(error, outside):
        BaseException.with_traceback(one, None)


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    tb = _TRACEBACK.__get__(error)
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next


def _clear(frame: FrameType) -> bool:
    """Clear a frame that has ended; False for a generator or coroutine that has not."""
    if frame.f_code.co_flags & _CAN_BE_SUSPENDED and not _has_ended(frame):
        return False
    # A frame that still runs, a caller's, refuses to be cleared, and is not to be.
    with contextlib.suppress(RuntimeError):
        frame.clear()
    return True


def _has_ended(frame: FrameType) -> bool:
    """Return whether the frame of a generator or coroutine has ended.

    Until then its variables and its code belong to the generator. Then the frame object takes them
    over, if anything refers to it, and is the one that shows them to the garbage collector.

    Source: ``frame_traverse`` and ``take_ownership`` of CPython 3.11 to 3.14.
    """
    return any(referent is frame.f_code for referent in gc.get_referents(frame))
