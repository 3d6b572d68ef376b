"""Graphs of the simulated device, as `torch.cuda.graph` captures and `CUDAGraph.replay` runs them.

Captured work does not run: what it writes keeps its bytes, what it makes is 0xFF. A replay runs it
in the order of its launches over the same memory, as one launch. A call that CUDA forbids breaks
the capture, as does one that only this device can't capture: whatever follows, and its end, fails.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from .._allocator._runtime import CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, error_of, last_error
from .._device._machine import machine
from .._device._races import Span
from .._device._streams import Stream, current_stream, default_stream, stream
from .._device._which import current_index
from ._device_memory import empty_cache


def is_current_stream_capturing() -> bool:
    """Return whether launches of this thread are recorded into a graph."""
    return current_stream().capture is not None


class CUDAGraph:
    """Work that was recorded once and runs as often as it is replayed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the graph."""
        self.stream: Stream | None = None
        self._calls: list[Callable[[], None]] = []
        self._reads: list[Span] = []
        self._writes: list[Span] = []
        self._n_flops = 0
        self._is_broken = self._is_whole = False

    def capture_begin(self, *pool: Any, **modes: Any) -> None:
        """Let the current stream record from now on.

        Raises:
            RuntimeError: it is the default stream, or the graph was captured already.
        """
        if self._is_whole:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph,"
                " create a new instance."
            )
        if current_stream() is default_stream():
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture,"
                " it's ok to replay them on the default stream.)"
            )
        machine.forbid_in_capture()
        self.stream, machine.capture = current_stream(), self

    def capture_end(self) -> None:
        """Let the stream of the capture run again what it is given.

        Raises:
            torch.AcceleratorError: the capture was broken.
        """
        if machine.capture is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        machine.capture = None
        self._require_intact()
        self._is_whole = True

    def add(self, call: Callable[[], None], reads: list[Span], writes: list[Span], n: int) -> None:
        """Record a call of `n` floating-point operations that the stream was given."""
        self._require_intact()
        self._calls.append(call)
        self._reads += reads
        self._writes += writes
        self._n_flops += n

    def fail(self) -> NoReturn:
        """Raise CUDA's error of a call that a capture does not allow, and break the capture."""
        self._is_broken = True
        raise error_of(CAPTURE_UNSUPPORTED)

    def refuse(self, what: str) -> NoReturn:
        """Refuse what CUDA can capture, or refuses in other words, and break the capture."""
        self._is_broken = True
        raise RuntimeError(f"The simulated accelerator captures no {what}: leave it out of graphs.")

    def replay(self) -> None:
        """Run all of it on the current stream.

        Raises:
            RaceError: it touches memory that another stream uses.
        """
        if not self._is_whole:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        machine.forbid_in_capture()
        on = current_stream()
        machine.launch("graph replay", on, self._reads, self._writes)
        for call in self._calls:
            call()
        n_bytes = sum(span.high - span.low for span in (*self._reads, *self._writes))
        machine.clock.launch_kernel(on, self._n_flops, n_bytes)
        last_error.check()

    def _require_intact(self) -> None:
        if self._is_broken:
            raise error_of(CAPTURE_INVALIDATED)


class graph:
    """Context that captures what is launched in it, on a stream of its own or on `stream`."""

    default_capture_stream: Stream | None = None

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **modes: Any
    ) -> None:
        self._graph = cuda_graph
        self._chosen = stream
        self._context: Any = None

    def __enter__(self) -> None:
        machine.synchronize(current_index())
        empty_cache()
        self._context = stream(self._chosen or Stream())
        self._context.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
        self._context.__exit__(*error)
