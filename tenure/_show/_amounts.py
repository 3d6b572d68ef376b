"""What a total is made of: one bar in as many parts, each with its bytes and its share.

As text each part has a line of its own, which begins where the one above it ends, so that no colour
is needed to tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tenure._text import format_bytes

from ._colours import colours_of
from ._part import Line, Part
from ._table import Column, Table, Tinted

_WIDTH = 32
_WHOLE, _LEFT, _RIGHT, _THIN, _MARK = "█▌▐▏┆"
_COLUMNS = (Column("category"), Column("bytes", ">", True), Column("share", ">", True))
_TOTAL = "total"


def ranked(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Parts with the largest first; those of a fixed order, as the phases of a step, need none."""
    return sorted(parts, key=lambda part: -part[1])


class _Span(NamedTuple):
    """A part, and where in the bar it begins."""

    name: str
    n_bytes: int
    begin_bytes: int
    colour: str


@dataclass(frozen=True, slots=True)
class Amounts(Part):
    """Parts of a total.

    Attributes:
        title: what stands above them; can be empty.
        parts: the name and the bytes of each, in their order. One without bytes is left out, and a
            negative one has no place in the bar.
        limit_bytes: what there is, marked in the bar; None where nothing is known of that.
    """

    title: str
    parts: Sequence[tuple[str, int]]
    limit_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(n_bytes for _, n_bytes in self.parts)

    def lines(self, width: int) -> Iterator[Line]:
        """The title, and a line for each part and for the total; without room for it, no bar."""
        return self._table().lines(width)

    def _table(self) -> Table:
        limit = "" if self.limit_bytes is None else f"{_MARK} = {format_bytes(self.limit_bytes)}"
        rows = [
            (
                Tinted(span.name, span.colour),
                *self._figures(span.n_bytes),
                Tinted(self._line(span.begin_bytes, span.n_bytes), span.colour),
            )
            for span in self._spans()
        ]
        total = (_TOTAL, *self._figures(self.total_bytes), self._line(0, self.total_bytes))
        return Table(self.title, (*_COLUMNS, Column(limit, is_code=True, spare=1)), [*rows, total])

    def _figures(self, n_bytes: int) -> tuple[str, str]:
        share = f"{n_bytes / self.total_bytes:.1%}" if self.total_bytes > 0 else ""
        return format_bytes(n_bytes), share

    def _spans(self) -> Iterator[_Span]:
        begin_bytes = 0
        colours = colours_of(name for name, _ in self.parts)
        for name, n_bytes in self.parts:
            if n_bytes:
                yield _Span(name, n_bytes, begin_bytes, colours[name])
            begin_bytes += max(n_bytes, 0)

    @property
    def _scale_bytes(self) -> int:
        """What the whole width stands for."""
        drawn_bytes = sum(max(n_bytes, 0) for _, n_bytes in self.parts)
        return max(drawn_bytes, self.limit_bytes or 0, 1)

    def _line(self, begin_bytes: int, n_bytes: int) -> str:
        """A part of the bar in characters, each of which is two steps wide."""
        cells = [" "] * (_WIDTH + 1)
        if n_bytes > 0:
            begin, end = self._step(begin_bytes), self._step(begin_bytes + n_bytes)
            for i in range(begin // 2, (end + 1) // 2):
                has_left, has_right = begin <= 2 * i, 2 * i + 1 < end
                cells[i] = _WHOLE if has_left and has_right else _LEFT if has_left else _RIGHT
            # a part that is too small to be drawn is there all the same
            if begin == end:
                cells[min(begin // 2, _WIDTH - 1)] = _THIN
        if self.limit_bytes is not None:
            cells[self._step(self.limit_bytes) // 2] = _MARK
        return "".join(cells).rstrip()

    def _step(self, n_bytes: int) -> int:
        return round(2 * _WIDTH * n_bytes / self._scale_bytes)
