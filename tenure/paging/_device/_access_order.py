"""What a pass will use next, learned from the passes before it.

Invariant: nothing is predicted that the last pass of the same kind did not use, so that fetching
ahead never moves bytes that the last pass did not need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from .._model import Unit


class AccessOrder:
    """The units that each kind of pass used, in order.

    A kind is whatever tells passes apart: the module that was called, and its mode.
    """

    def __init__(self) -> None:
        self._learned: dict[Hashable, list[Unit]] = {}
        self._next_kind: dict[Hashable, Hashable] = {}
        self._kind: Hashable = None
        self._predicted: list[Unit] = []
        self._position = 0
        self._trace: list[Unit] = []

    def begin(self, kind: Hashable) -> None:
        """A pass of this kind begins."""
        self._next_kind[self._kind] = kind
        self._kind = kind
        self._predicted = self._learned.get(kind, [])
        self._position, self._trace = 0, []

    def note(self, unit: Unit) -> None:
        """The pass begins to use a unit; where that was not expected, the prediction follows."""
        self._trace.append(unit)
        position, predicted = self._position, self._predicted
        if position < len(predicted) and predicted[position] is unit:
            self._position += 1
        elif unit in predicted[position:]:
            self._position = predicted.index(unit, position) + 1
        elif unit in predicted:
            self._position = predicted.index(unit) + 1

    def end(self, *, completed: bool) -> None:
        """The pass is over; only one that ran to its end is learned from."""
        if completed:
            self._learned[self._kind] = self._trace
        self._predicted, self._position = [], 0

    def upcoming(self) -> Iterator[Unit]:
        """The units to come, in order: the rest of this pass, then the pass that follows it."""
        yield from self._predicted[self._position :]
        yield from self._learned.get(self._next_kind.get(self._kind), [])

    def soon(self) -> dict[Unit, int]:
        """The units to come, each with how many come before it."""
        return {unit: i for i, unit in reversed(list(enumerate(self.upcoming())))}
