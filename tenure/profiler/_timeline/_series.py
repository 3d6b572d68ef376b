"""Levels over time, and the lives of storages under them, in bounded memory.

Time is cut into intervals of equal length, and of each the highest moment is kept. If there are too
many intervals, each two neighbours become one. Invariants: the highest moment of all is kept, so
the peak is exact however long a recording runs; every storage that was alive at a kept moment has
its life here.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

FOREVER = (1 << 63) - 1
"""The end of a storage that is alive when the recording ends."""
# intervals of a microsecond at first: shorter than an operation
_FIRST_SHIFT = 10
_LONGEST_SHIFT = 62
# Fewer are not searched for those that fall between the kept moments; of more, moments are dropped.
_FIRST_LOOK = 50_000
_MOST_LIVES = 1_000_000
_FEWEST_MOMENTS = 256


class Moment(NamedTuple):
    """A step of a recording, its time since the beginning, and the bytes in use."""

    number: int
    at_ns: int
    n_bytes: int


class Life(NamedTuple):
    """One storage, or one size of a storage that grows.

    Attributes:
        begin: the number of the first moment that it counts in.
        end: that of the first moment that it counts in no more.
        n_bytes: its bytes.
        place: where it was made, as `Places` numbers it.
        scope: the name of the scope that it was made in.
        category: what it counts as.
    """

    begin: int
    end: int
    n_bytes: int
    place: int
    scope: str
    category: str


class Series:
    """The moments of one device that are kept.

    Args:
        most: how many moments at the most.

    Attributes:
        moments: these, in order.
        lives: the storages that a moment falls into, and some more.
    """

    def __init__(self, most: int = 2048) -> None:
        self.moments: list[Moment] = []
        self.lives: list[Life] = []
        self._most = most
        self._shift = _FIRST_SHIFT
        self._next_look = _FIRST_LOOK

    def add(self, number: int, at_ns: int, n_bytes: int) -> None:
        """Note the level of a moment, which comes after all others."""
        moments = self.moments
        if moments and at_ns >> self._shift == moments[-1].at_ns >> self._shift:
            # of equals the first: a peak began when it was first reached
            if n_bytes > moments[-1].n_bytes:
                moments[-1] = Moment(number, at_ns, n_bytes)
            return
        moments.append(Moment(number, at_ns, n_bytes))
        if len(moments) > self._most:
            self._thin(self._most)

    def add_life(self, life: Life) -> None:
        """Note a storage that is gone, or that the recording ends in."""
        self.lives.append(life)
        if len(self.lives) < self._next_look:
            return
        self._keep_seen()
        # Many long lives: fewer moments have fewer lives between them, and the maxima stay.
        while len(self.lives) > _MOST_LIVES and len(self.moments) > _FEWEST_MOMENTS:
            self._thin(len(self.moments) // 2)
            self._keep_seen()
        # twice as many: all searches together then take a constant time for each life
        self._next_look = max(_FIRST_LOOK, 2 * len(self.lives))

    def index(self, number: int) -> int:
        """Return the index of the first moment that is kept from a number on."""
        return bisect_left(self.moments, (number,))

    def _thin(self, most: int) -> None:
        """Make intervals longer until there are no more than this."""
        while len(self.moments) > most and self._shift < _LONGEST_SHIFT:
            self._shift += 1
            before, self.moments = self.moments, []
            for moment in before:
                self.add(*moment)

    def _keep_seen(self) -> None:
        # each has ended before the moments that are still to come
        self.lives = [life for life in self.lives if self.index(life.begin) < self.index(life.end)]
