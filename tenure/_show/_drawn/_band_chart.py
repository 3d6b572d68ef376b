"""Bytes over time as bands on top of each other, with spans and marks on the same axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# More are no longer told apart, neither as bands nor in the legend.
_MOST_BANDS = 20
_OTHERS = "other"
# A tenth of a microsecond: no allocation is as short.
_DIGITS = 7
Series = Mapping[str, Sequence[int]]


class Span(NamedTuple):
    """A stretch of time with a name, inside of ``depth`` others."""

    name: str
    depth: int
    begin_s: float
    end_s: float


class Mark(NamedTuple):
    """A moment at which something went wrong."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class BandChart:
    """A chart; those of one page share the axis of time, and are zoomed together.

    Attributes:
        title: what is seen, as plain text.
        times_s: moments, increasing; what is in use at one stays so until the next.
        levels_bytes: what was in use at each.
        ways: by what it can be divided, such as ``"category"``: of each name its bytes at the
            moments. The first way is shown first, and of each way the first name is at the bottom.
        end_s: where the axis ends.
        spans: drawn as bars below the bands, in the colours of the way ``span_way``.
        span_way: see there.
        marks: drawn as lines, and listed.
    """

    title: str
    times_s: Sequence[float]
    levels_bytes: Sequence[int]
    ways: Mapping[str, Series]
    end_s: float
    spans: Sequence[Span] = ()
    span_way: str = "scope"
    marks: Sequence[Mark] = ()

    kind = "bands"

    def names(self) -> Iterator[tuple[str, str]]:
        """Each way and each name that needs a colour."""
        for way, series in self.ways.items():
            yield from ((way, name) for name in series)
        yield from ((self.span_way, span.name) for span in self.spans)

    def facts(self) -> dict[str, object]:
        """What the drawing is made of."""
        peak = max(range(len(self.times_s)), key=self.levels_bytes.__getitem__, default=None)
        return {
            "title": self.title,
            "times": [round(at_s, _DIGITS) for at_s in self.times_s],
            "levels": list(self.levels_bytes),
            "ways": [
                {"name": way, "bands": _bands(series, peak or 0)}
                for way, series in (self.ways or {"": {}}).items()
            ],
            "end": round(self.end_s, _DIGITS),
            "peak": peak,
            "spans": _compact(self.spans),
            "spanWay": self.span_way,
            "marks": [mark._asdict() for mark in self.marks],
        }


def _bands(series: Series, peak: int) -> list[dict[str, object]]:
    """Those that have bytes at all; of very many the largest, and what the others have together."""
    found = {name: list(values) for name, values in series.items() if any(values)}
    if len(found) > _MOST_BANDS:
        # what weighs at the peak goes before what weighs most anywhere
        named = sorted(found.keys() - {_OTHERS}, key=lambda n: (found[n][peak], max(found[n]), n))
        least = [*named[: 1 - _MOST_BANDS], *({_OTHERS} & found.keys())]
        found[_OTHERS] = [sum(values) for values in zip(*map(found.pop, least), strict=True)]
    return [{"name": name, "values": values} for name, values in found.items()]


def _compact(spans: Sequence[Span]) -> dict[str, list[object]]:
    """Each name once: a loop opens the same scope at every step."""
    names = {name: i for i, name in enumerate(dict.fromkeys(span.name for span in spans))}
    ordered = sorted(spans, key=lambda span: span.begin_s)
    rows = [
        [names[s.name], s.depth, round(s.begin_s, _DIGITS), round(s.end_s, _DIGITS)]
        for s in ordered
    ]
    return {"names": list(names), "rows": [*rows]}
