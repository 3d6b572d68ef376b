"""Graphs of the simulated device, as `torch.cuda.graph` captures and `CUDAGraph.replay` runs them.

Captured work does not run: what it writes keeps its bytes, what it makes is 0xFF. A replay runs it
in the order of its launches over the same memory, as one launch.
"""

from typing import Any

from .._allocator import last_error
from .._device._blocks import live_blocks
from .._device._capture import Capture
from .._device._machine import machine
from .._device._races import History, Span
from .._device._streams import Stream, current_stream, default_stream, stream
from .._device._which import current_index
from ._device_memory import empty_cache


def is_current_stream_capturing() -> bool:
    """Whether launches of this thread are recorded into a graph."""
    return current_stream().capture is not None


class CUDAGraph:
    """Work that was recorded once and runs as often as it is replayed."""

    def __init__(self) -> None:
        self._capture: Capture | None = None
        self._outside: list[History] = []

    def capture_begin(self, *pool: Any, **modes: Any) -> None:
        """Let the current stream record from now on.

        Raises:
            RuntimeError: it is the default stream, or the graph was captured already.
        """
        if self._capture is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph,"
                " create a new instance."
            )
        self._stream = current_stream()
        if self._stream is default_stream():
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture,"
                " it's ok to replay them on the default stream.)"
            )
        machine.forbid_in_capture()
        self._outside = [block.history for block in live_blocks()]
        self._capture = machine.capture = self._stream.capture = Capture()

    def capture_end(self) -> None:
        """Let the streams of the capture run again what they are given.

        Raises:
            torch.AcceleratorError: the capture was broken, or a stream has joined it and left work
                that the first stream has not waited for.
        """
        capture, self._capture = self._capture, None
        if capture is None or capture.is_over:
            raise RuntimeError("capture_end() called before capture_begin().")
        machine.capture = None
        try:
            capture.end(self._stream)
        finally:
            for each in machine.streams.values():
                each.capture, each.captured = None, {}
        self._capture = capture

    def replay(self) -> None:
        """Run all of it on the current stream.

        Raises:
            RaceError: it touches memory that was freed since, or that another stream uses.
        """
        if self._capture is None or not self._capture.is_over:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        machine.forbid_in_capture()
        works, on = self._capture.works, current_stream()
        reads = [span for work in works for span in work.reads]
        writes = [span for work in works for span in work.writes]
        self._find_freed([*reads, *writes])
        machine.launch("graph replay", on, reads, writes)
        for work in works:
            work.run(on)
            work.count(machine.clock, on)
        last_error.check()

    def reset(self) -> None:
        """Forget the graph."""
        self._capture = None

    def _find_freed(self, used: list[Span]) -> None:
        """Report memory from outside the graph that it was captured with and that is gone.

        What was made in the capture lies in the graph's own pool, which lives as long as the graph.
        """
        alive = {id(block.history) for block in live_blocks()}
        gone = {id(history) for history in self._outside} - alive
        for span in used:
            if id(span.history) in gone:
                machine.detector.report(
                    f"graph replay after free: the graph uses bytes {span.low} to {span.high} of a"
                    " block that was freed since its capture. Keep what a graph reads and writes"
                    " allocated for as long as it is replayed."
                )


class graph:
    """Context that captures what is launched in it, on a stream of its own or on `stream`."""

    default_capture_stream: Stream | None = None

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **modes: Any
    ) -> None:
        self._graph = cuda_graph
        self._chosen = stream

    def __enter__(self) -> None:
        machine.synchronize(current_index())
        empty_cache()
        self._context = stream(self._chosen or Stream())
        self._context.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
        self._context.__exit__(*error)
