"""The lives of storages in compact columns: from which moment to which, how large, whose.

A life that no kept moment falls into adds to nothing that is shown, and is let go; most end within
a few operations. Invariant: every storage that was alive at a kept moment is in the columns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._series import Series

FOREVER = (1 << 63) - 1
"""The end of a storage that is alive when the recording ends."""
# 34 bytes each; looking through them takes about a microsecond each
_FIRST_LOOK = 50_000
_MOST_LIVES = 1_000_000
_FEWEST_MOMENTS = 256


class Life(NamedTuple):
    """One storage, or one size of a storage that grows.

    Attributes:
        begin: the first moment that it counts in.
        end: the first moment that it counts in no more.
        n_bytes: its bytes.
        place: where it was made, as `Places` numbers it.
        scope: the scope that it was made in, as `Bands` numbers it.
        category: what it counts as, as `_categories` numbers it.
    """

    begin: int
    end: int
    n_bytes: int
    place: int
    scope: int
    category: int


class Lives:
    """The lives on one device that a kept moment falls into.

    Args:
        series: the moments that are kept; they become fewer if there are too many lives.
    """

    def __init__(self, series: Series) -> None:
        self._series = series
        self._columns = _columns()
        self._next_look = _FIRST_LOOK

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Life]:
        return map(Life._make, zip(*self._columns, strict=True))

    def add(self, life: Life) -> None:
        """Note one that has ended, or that the recording ends in."""
        for column, value in zip(self._columns, life, strict=True):
            column.append(value)
        if len(self) >= self._next_look:
            self._let_go()

    def _let_go(self) -> None:
        self._keep_seen()
        # Many long lives: fewer moments have fewer lives between them, and the maxima stay.
        while len(self) > _MOST_LIVES and len(self._series) > _FEWEST_MOMENTS:
            self._series.thin(len(self._series) // 2)
            self._keep_seen()
        # twice as many: the looks together then take no more than a constant for each life
        self._next_look = max(_FIRST_LOOK, 2 * len(self))

    def _keep_seen(self) -> None:
        moments = self._series.moments
        kept = _columns()
        # the end of what is known: moments that are still to be told of may fall into these
        open_from = moments[-1] if moments else -1
        for life in self:
            if life.end > open_from or _is_seen(life, moments):
                for column, value in zip(kept, life, strict=True):
                    column.append(value)
        self._columns = kept


def _is_seen(life: Life, moments: Sequence[int]) -> bool:
    place = bisect_left(moments, life.begin)
    return place < len(moments) and moments[place] < life.end


def _columns() -> tuple[array[int], ...]:
    return array("q"), array("q"), array("q"), array("i"), array("i"), array("b")
