"""The streams of a backward pass: each node works on the stream that its operator was launched on.

As on CUDA, a node waits for the nodes that feed it, the first ones for the caller's stream, and the
caller's stream for all of them at the end; gradients are recorded on the streams that use them.
What a hook launches elsewhere, nothing waits for.

Torch tells a Python device nothing of this. So each thread notes from which node on which stream
was current, by the numbers that autograd counts its nodes with; without a second stream that is
all.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tenure._torch.autograd import OF_A_LEAF, node_number
from tenure._torch.gradient_sums import current_node, next_sequence

from .._torch_backend import is_node_on_device

_MOST_NOTED = 10_000


class StreamLog:
    """Which stream was current in one thread, by device and by the numbers of the nodes made."""

    def __init__(self) -> None:
        self._notes: dict[int, list[tuple[int, Any]]] = {}

    def note(self, index: int, before: Any, after: Any) -> None:
        """The current stream changes now."""
        number, notes = next_sequence(), self._notes.setdefault(index, [(0, before)])
        if notes[-1][0] == number:
            # No node was made while that one was current.
            notes.pop()
        if not notes or notes[-1][1] is not after:
            notes.append((number, after))
        if len(notes) > _MOST_NOTED:
            del notes[: _MOST_NOTED // 2]

    def at(self, index: int, number: int) -> Any:
        """The stream that was current when that node was made; None if that is not known."""
        earlier = [stream for first, stream in self._notes.get(index, ()) if first <= number]
        return earlier[-1] if earlier else None

    def streams(self) -> list[Any]:
        """All that were current."""
        return [stream for notes in self._notes.values() for _, stream in notes]


class Pass:
    """One backward pass.

    Args:
        roots: its first nodes.
        log: what the thread that called it has noted.
        around: the current stream of each device in that thread.
        owns: whether a stream is one of the machine as it was last started.
    """

    def __init__(
        self, roots: Iterable[Any], log: StreamLog, around: list[Any], owns: Callable[[Any], bool]
    ) -> None:
        self._thread = threading.get_ident()
        self._log, self._around, self._owns = log, around, owns
        known = {id(stream) for stream in around}
        self._is_plain = all(id(each) in known for each in log.streams() if owns(each))
        self._roots = [] if self._is_plain else list(roots)
        self._feeders = _feeders(self._roots)
        self._start = [] if self._is_plain else [each.record_event() for each in around]
        self._ends: dict[Any, list[Any]] = {}
        self._node: Any = None

    def stream(self, index: int) -> Any:
        """The stream of the node that is running; None for one on the host.

        A callback at the end of the pass, which no node runs, is on the caller's stream, and after
        all nodes.

        Source: ``GraphTask::exec_post_processing`` of torch/csrc/autograd/engine.cpp.
        """
        if self._is_plain:
            return self._around[index]
        node = current_node()
        if node is None:
            self._join()
            return self._around[index]
        if not is_node_on_device(node):
            return None
        if node is not self._node:
            self._enter(node)
        return self._stream_of(node, index)

    def chosen_around(self, index: int) -> Any:
        """What the calling thread, if this is it, has as current stream around the pass."""
        return self._around[index] if threading.get_ident() == self._thread else None

    def finish(self) -> None:
        """Let the caller's streams wait for all nodes."""
        self._join()
        # A gradient's history refers to its pass, and a leaf's node to the leaf, which has the
        # gradient: no collector sees that circle, part of which is in C++.
        self._roots.clear()
        self._feeders.clear()

    def _join(self) -> None:
        self._leave()
        for events in self._ends.values():
            for around, event in zip(self._around, events, strict=True):
                around.wait_event(event)
        self._ends.clear()

    def _enter(self, node: Any) -> None:
        self._leave()
        self._node = node
        waited = {id(event): event for event in self._ready(node, set())}
        for index in range(len(self._around)):
            for event in waited.values():
                self._stream_of(node, index).wait_event(event)

    def _leave(self) -> None:
        if self._node is not None:
            streams = [self._stream_of(self._node, index) for index in range(len(self._around))]
            self._ends[self._node] = [stream.record_event() for stream in streams]
        self._node = None

    def _ready(self, node: Any, seen: set[Any]) -> Iterator[Any]:
        """What must have run before a node: what feeds it, and what feeds the same nodes as it.

        Two gradients of one tensor are added up by the later one's node.
        """
        if node in self._roots:
            yield from self._start
        beside = (each for feeds, _ in node.next_functions for each in self._feeders.get(feeds, ()))
        for feeder in (*self._feeders.get(node, ()), *beside):
            if feeder in seen or feeder is node:
                continue
            seen.add(feeder)
            if feeder in self._ends:
                yield from self._ends[feeder]
            elif feeder in self._feeders.get(node, ()):
                # It launched nothing: the work of what fed it comes before.
                yield from self._ready(feeder, seen)

    def _stream_of(self, node: Any, index: int) -> Any:
        number = node_number(node)
        if number == OF_A_LEAF:
            # Made for the first operator that took the leaf.
            number = min(map(node_number, self._feeders.get(node, ())), default=0)
        found = self._log.at(index, number)
        return found if found is not None and self._owns(found) else self._around[index]


def _feeders(roots: list[Any]) -> dict[Any, list[Any]]:
    """For each node of a graph the nodes that it gets gradients from."""
    feeders: dict[Any, list[Any]] = {root: [] for root in roots}
    left = list(feeders)
    while left:
        node = left.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in feeders:
                feeders[following] = []
                left.append(following)
            feeders[following].append(node)
    return feeders
