"""One pass over a model: who runs it, what it uses, and what comes next.

Invariant: nothing is predicted that the last pass of the same kind did not use, so that fetching
ahead never moves bytes that the last pass did not need; only what ran to its end is learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from threading import get_ident

from torch import Tensor

from ._page import Page
from ._tensors import HostTensor, Unit


class AccessOrder:
    """The units that each kind of pass used, in order.

    A kind is whatever tells passes apart: the module that was called, and its mode. Kinds that take
    turns, such as the two halves of a diffusion pipeline's autoencoder, are expected in turn.
    """

    def __init__(self) -> None:
        self._learned: dict[Hashable, list[Unit]] = {}
        self._next_kind: dict[Hashable, Hashable] = {}
        self._last_kind: Hashable = None

    def begin(self, kind: Hashable) -> list[Unit]:
        """Return a pass of this kind begins; what the last one of its kind used."""
        self._next_kind[self._last_kind] = kind
        self._last_kind = kind
        return self._learned.get(kind, [])

    def learn(self, kind: Hashable, used: list[Unit]) -> None:
        """Learn the units that a pass of this kind has used."""
        self._learned[kind] = used

    def expect(self, kind: Hashable, first: Pass) -> None:
        """Expect a pass of this kind after one like the first; at first in opposite order."""
        self._next_kind.setdefault(first.kind, kind)
        self._learned.setdefault(kind, first.used[::-1])

    def after(self, kind: Hashable) -> list[Unit]:
        """Return the units of the pass that followed one of this kind."""
        return self._learned.get(self._next_kind.get(kind), [])


@dataclass(eq=False, slots=True)
class Forward:
    """A forward that runs.

    Attributes:
        pages: what it uses.
        restores: put back what was changed for it, the last first.
        is_compiled: whether it runs compiled code.
        has_completed: whether it came to its end.
    """

    pages: list[Page] = field(default_factory=list)
    restores: list[Callable[[], object]] = field(default_factory=list)
    is_compiled: bool = False
    has_completed: bool = False


class Visit:
    """A thread inside of a paged model.

    Args:
        name: of the class of the outermost module.

    Attributes:
        name: as above.
        thread: the id of the thread.
    """

    def __init__(self, name: str = "A model") -> None:
        self.name, self.thread = name, get_ident()


class Pass(Visit):
    """From the begin of the outermost forward to its end.

    Args:
        order: what the passes before it used.
        kind: of pass.
        name: as of a visit.

    Attributes:
        kind: as above.
        forwards: those that run, the outermost first.
        loose: the pages in use that no forward brackets.
        assigned: what the program has assigned in the place of host tensors.
        is_backward: whether it is a backward pass, which goes on where no forward runs in it.
        records: whether autograd records a graph of it.
        saves_buffers: whether every buffer that was shown is to be written back.
        used: the unit of each use, in order.
    """

    def __init__(self, order: AccessOrder, kind: Hashable = None, name: str = "") -> None:
        super().__init__(name)
        self.forwards: list[Forward] = []
        self.loose: list[Page] = []
        self.assigned: dict[HostTensor, Tensor] = {}
        self.saves_buffers = self.is_backward = self.records = False
        self._order, self.kind = order, kind
        self._predicted: list[Unit] = []
        # How many of these are past. The units that were really used before may be different.
        self._position = 0
        self.used: list[Unit] = []

    def begin(self) -> None:
        """Begin a pass, and expect the units of the last one of its kind."""
        self._predicted = self._order.begin(self.kind)

    def note(self, unit: Unit) -> bool:
        """Note the use of a unit; if it was not expected, correct the prediction.

        Returns:
            Whether another unit is expected now.
        """
        before, is_more = self._position, self.goes_on(unit)
        self.used.append(unit)
        if self.expects(unit):
            self._position += 1
        # The modules of a unit come one by one: it may be one more than the last time.
        elif not is_more:
            # A mixture of experts leaves some out, or comes to them in another order: what was
            # predicted behind this use still stands.
            position, n = self._position, len(self._predicted)
            order = (*range(position, n), *range(position))
            self._position = next((i + 1 for i in order if self._predicted[i] == unit), position)
        return self._position != before and not self.expects(unit)

    def goes_on(self, unit: Unit) -> bool:
        """Return whether the last use was of this unit, too."""
        return bool(self.used and self.used[-1] == unit)

    def expects(self, unit: Unit) -> bool:
        """Return whether a unit is the one that comes next."""
        return self._predicted[self._position : self._position + 1] == [unit]

    def upcoming(self) -> Iterator[Unit]:
        """Yield the uses to come: the rest of this pass, then the pass that follows."""
        yield from self._predicted[self._position :]
        yield from self._order.after(self.kind)

    @property
    def n_left(self) -> int:
        """How many of them are of this pass."""
        return len(self._predicted) - self._position

    def soon(self) -> dict[Unit, int]:
        """Return the units to come, each with how many come before it."""
        return {unit: i for i, unit in reversed(list(enumerate(self.upcoming())))}

    def end(self, *, completed: bool) -> None:
        """End a pass; learn from it only if it ran to its end."""
        if completed:
            self._order.learn(self.kind, self.used)
        self._predicted, self._position = [], 0
