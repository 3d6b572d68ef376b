"""Levels over time in bounded memory: what is thinned are the valleys, never a maximum.

Time is cut into intervals of equal length, and of each the highest moment is kept. When there are
too many intervals each two neighbours become one. Invariant: the highest moment of all is kept, so
the peak is exact however long a recording runs.
"""

from __future__ import annotations

from array import array

MOST_MOMENTS = 2048
# intervals of a microsecond at first: shorter than an operation
_FIRST_SHIFT = 10
_LONGEST_SHIFT = 62


class Series:
    """The moments that are kept of one device.

    Args:
        most: how many moments at the most.

    Attributes:
        moments: their numbers, increasing; all lives and levels of a recording share them.
        times_ns: when they were, since the recording began.
        levels: the bytes in use at each.
    """

    def __init__(self, most: int = MOST_MOMENTS) -> None:
        self.moments = array("q")
        self.times_ns = array("q")
        self.levels = array("q")
        self._most = most
        self._shift = _FIRST_SHIFT
        self._interval = -1

    def __len__(self) -> int:
        return len(self.moments)

    def add(self, moment: int, at_ns: int, n_bytes: int) -> None:
        """Note the level of a moment, which comes after all others."""
        interval = at_ns >> self._shift
        if interval == self._interval:
            # of equals the first: a peak began when it was first reached
            if n_bytes > self.levels[-1]:
                self.moments[-1], self.times_ns[-1], self.levels[-1] = moment, at_ns, n_bytes
            return
        self._interval = interval
        self.moments.append(moment)
        self.times_ns.append(at_ns)
        self.levels.append(n_bytes)
        if len(self.moments) > self._most:
            self.thin(self._most)

    def thin(self, most: int) -> None:
        """Make intervals longer until there are no more than this."""
        while len(self) > most and self._shift < _LONGEST_SHIFT:
            self._shift += 1
            self._merge()
        self._interval = self.times_ns[-1] >> self._shift if self.times_ns else -1

    def highest(self) -> int:
        """The place of the highest moment; the first, of several."""
        return self.levels.index(max(self.levels))

    def _merge(self) -> None:
        before = list(zip(self.moments, self.times_ns, self.levels, strict=True))
        del self.moments[:], self.times_ns[:], self.levels[:]
        interval = -1
        for moment, at_ns, n_bytes in before:
            if at_ns >> self._shift != interval:
                interval = at_ns >> self._shift
                self.moments.append(moment)
                self.times_ns.append(at_ns)
                self.levels.append(n_bytes)
            elif n_bytes > self.levels[-1]:
                self.moments[-1], self.times_ns[-1], self.levels[-1] = moment, at_ns, n_bytes
