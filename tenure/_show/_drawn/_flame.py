"""What a total is made of, level by level: a flame graph that hangs from its root."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class FlameRow(NamedTuple):
    """A part of the total.

    Attributes:
        facets: by the name of a facet, where the part belongs: from the outermost to the innermost,
            as the calls of a stack.
        n_bytes: its bytes.
        n: how many things it is made of.
    """

    facets: Mapping[str, Sequence[str]]
    n_bytes: int
    n: int


@dataclass(frozen=True, slots=True)
class Flame:
    """A flame graph.

    Attributes:
        title: what is seen, as plain text.
        rows: the parts.
        orders: the facets from the top to the bottom; the first is shown first, others on demand.
        colour: the facet whose colour a part has; of several parts that of the largest.
        unit: what ``n`` of a row counts, in the plural.
    """

    title: str
    rows: Sequence[FlameRow]
    orders: Sequence[Sequence[str]]
    colour: str
    unit: str

    kind = "flame"

    def names(self) -> Iterator[tuple[str, str]]:
        """Each name that needs a colour."""
        for row in self.rows:
            yield from ((self.colour, name) for name in row.facets.get(self.colour, ()))

    def facts(self) -> dict[str, object]:
        """What the drawing is made of; each name once, as stacks share most of theirs."""
        names: dict[str, int] = {}
        rows = [
            [
                {f: [names.setdefault(n, len(names)) for n in row.facets[f]] for f in row.facets},
                row.n_bytes,
                row.n,
            ]
            for row in self.rows
        ]
        return {
            "title": self.title,
            "names": list(names),
            "rows": rows,
            "orders": [list(order) for order in self.orders],
            "colour": self.colour,
            "unit": self.unit,
        }
