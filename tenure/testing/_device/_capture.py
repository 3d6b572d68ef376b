"""The capture of a graph: its streams record work and run none, and the host must not wait.

CUDA refuses each forbidden call with a code of its own and breaks the capture by it: whatever
follows on its streams, and its end, then fails too. The mode is CUDA's default, "global": what one
thread must not do while a stream captures, no other thread may do either.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from .._allocator import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    error_of,
    last_error,
)
from ._clock import Clock, Engine
from ._races import Span, VectorClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one launch does, so that it can be done again.

    Attributes:
        name: the operator.
        run: does it, on a stream.
        engine: what it keeps busy.
    """

    name: str
    run: Callable[[Any], None]
    reads: list[Span]
    writes: list[Span]
    engine: Engine = "compute"
    n_flops: int = 0
    n_bytes: int = 0

    def count(self, clock: Clock, stream: Any) -> None:
        """Put the time that it takes on a stream."""
        if self.engine == "compute":
            clock.launch_kernel(stream, self.n_flops, self.n_bytes)
        else:
            clock.launch_copy(stream, self.engine, self.n_bytes, pinned=True)


class Capture:
    """One capture, from its begin to its end; `works` is the graph."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.is_over = False
        self._is_broken = False
        self._ticks: VectorClock = {}

    def add(self, work: Work, stream: Any) -> None:
        """Record what a stream of the capture was given."""
        self.require_intact()
        number = stream.number
        self._ticks[number] = stream.captured[number] = self._ticks.get(number, 0) + 1
        self.works.append(work)

    def fail(self, code: int = CAPTURE_UNSUPPORTED) -> NoReturn:
        """Raise CUDA's error of a call that the capture does not allow, and break the capture."""
        self._is_broken = True
        raise error_of(code)

    def refuse_call(self) -> int:
        """What a runtime function returns that is not allowed; it breaks the capture too."""
        self._is_broken = True
        return last_error.note(CAPTURE_UNSUPPORTED)

    def require_intact(self) -> None:
        """Raise, if a forbidden call came before."""
        if self._is_broken:
            raise error_of(CAPTURE_INVALIDATED)

    def end(self, first: Any) -> None:
        """Finish on the stream that it began on.

        Raises:
            torch.AcceleratorError: a forbidden call came before; or another stream has joined, and
                the first has not waited for it.
        """
        self.is_over = True
        self.require_intact()
        if any(first.captured.get(stream_id, 0) < tick for stream_id, tick in self._ticks.items()):
            raise error_of(CAPTURE_UNJOINED)
