"""A page that draws itself: bands over time, flames, tables to search, and scripts of our own.

A drawing is the data that its script takes. The scripts know nothing of what they show.

Invariant: the page asks for nothing and runs nothing but these scripts. Its policy forbids both, so
that a name which got through as markup could neither.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tenure._visible import visible

from .._colours import colours_of
from .._page import page
from .._part import escaped

_SCRIPTS = ("page.js", "time_axis.js", "bands.js", "flame.js", "grid.js", "begin.js")
# More are no longer told apart, neither as bands nor in the legend.
_MOST_BANDS = 20
_OTHERS = "other"
# A tenth of a microsecond: no allocation is as short.
_DIGITS = 7
# the rows of a table until the reader asks for all
_FIRST_ROWS = 20
Drawing = dict[str, Any]
Section = tuple[str, str, Sequence[Drawing | str]]
"""A heading, what is seen below it, and drawings or HTML."""
Fact = tuple[str, str, str, bool]
"""A number that the page begins with: name, value, detail, and whether it is what went wrong."""


def bands(
    title: str,
    times_s: Sequence[float],
    levels_bytes: Sequence[int],
    ways: Mapping[str, Mapping[str, Sequence[int]]],
    end_s: float,
    spans: Sequence[tuple[str, int, float, float]] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> Drawing:
    """A chart of bytes over time; those of one page share the axis, and are zoomed together.

    Args:
        title: what is seen, as plain text.
        times_s: moments, increasing; what is in use at one stays so until the next.
        levels_bytes: what was in use at each.
        ways: by what it can be divided, such as ``"category"``: of each name its bytes at the
            moments. The first way is shown first, and of each way the first name is at the bottom.
        end_s: where the axis ends.
        spans: name, depth, begin and end, as bars below the bands in the colours of scopes.
        marks: moments at which something went wrong, and what.
    """
    peak = max(range(len(times_s)), key=levels_bytes.__getitem__, default=None)
    names = {name: i for i, name in enumerate(dict.fromkeys(span[0] for span in spans))}
    ordered = sorted(spans, key=lambda span: span[2])
    divided = {way: _bands(series, peak or 0) for way, series in (ways or {"": {}}).items()}
    coloured = {way: [band["name"] for band in found] for way, found in divided.items()}
    return {
        "coloured": {**coloured, "scope": [*coloured.get("scope", ()), *names]},
        "kind": "bands",
        "title": title,
        "times": [round(at_s, _DIGITS) for at_s in times_s],
        "levels": list(levels_bytes),
        "ways": [{"name": way, "bands": found} for way, found in divided.items()],
        "end": round(end_s, _DIGITS),
        "peak": peak,
        "spans": {
            "names": list(names),
            "rows": [
                [names[name], depth, round(begin_s, _DIGITS), round(end_s, _DIGITS)]
                for name, depth, begin_s, end_s in ordered
            ],
        },
        "spanWay": "scope",
        "marks": [{"at_s": at_s, "text": text} for at_s, text in marks],
    }


def _bands(series: Mapping[str, Sequence[int]], peak: int) -> list[dict[str, Any]]:
    """Those that have bytes at all; of very many the largest, and what the others have together."""
    found = {name: list(values) for name, values in series.items() if any(values)}
    if len(found) > _MOST_BANDS:
        # what weighs at the peak goes before what weighs most anywhere
        named = sorted(found.keys() - {_OTHERS}, key=lambda n: (found[n][peak], max(found[n]), n))
        least = [*named[: 1 - _MOST_BANDS], *({_OTHERS} & found.keys())]
        found[_OTHERS] = [sum(values) for values in zip(*map(found.pop, least), strict=True)]
    return [{"name": name, "values": values} for name, values in found.items()]


def flame(
    title: str,
    rows: Sequence[tuple[Mapping[str, Sequence[str]], int, int]],
    orders: Sequence[Sequence[str]],
    colour: str,
    unit: str,
) -> Drawing:
    """A flame graph that hangs from its root.

    Args:
        title: what is seen, as plain text.
        rows: the parts: by the name of a facet where each belongs, from the outermost to the
            innermost; its bytes; of how many things it is made.
        orders: the facets from the top to the bottom; the first is shown first, others on demand.
        colour: the facet whose colour a part has; of several parts that of the largest.
        unit: what the things are, in the plural.
    """
    # each name once, as stacks share most of theirs
    names: dict[str, int] = {}
    told = [
        [
            {f: [names.setdefault(name, len(names)) for name in facets[f]] for f in facets},
            n_bytes,
            n,
        ]
        for facets, n_bytes, n in rows
    ]
    return {
        "coloured": {colour: [name for facets, _, _ in rows for name in facets.get(colour, ())]},
        "kind": "flame",
        "title": title,
        "names": list(names),
        "rows": told,
        "orders": [list(order) for order in orders],
        "colour": colour,
        "unit": unit,
    }


def grid(
    title: str,
    columns: Mapping[str, str],
    rows: Sequence[Sequence[Any]],
    colour: str = "",
    note: str = "",
) -> Drawing:
    """A table that is sorted by any column, and searched.

    Args:
        title: what it shows, as plain text.
        columns: by its heading the kind of each: ``"text"``; ``"name"`` for text with a colour;
            ``"code"`` for source, whose spaces count; ``"place"`` for a line of it; ``"count"``;
            ``"bytes"``, behind which stands which part of the largest it is; ``"lines"``.
        rows: the cells of each row: text, a number, a number with how it is spelled, or lines.
        colour: the way, as of a chart, whose colours the names have.
        note: what stands below it.
    """
    named = [i for i, kind in enumerate(columns.values()) if kind == "name"]
    told = [
        {"heading": heading, "kind": kind, "has_bar": kind == "bytes"}
        for heading, kind in columns.items()
    ]
    return {
        "coloured": {colour: [str(row[i]) for i in named for row in rows]},
        "kind": "grid",
        "title": title,
        "columns": told,
        "rows": [list(row) for row in rows],
        "colour": colour,
        "note": note,
        "first": _FIRST_ROWS,
    }


def drawn_page(
    title: str,
    sections: Sequence[Section],
    *,
    told: str = "",
    facts: Sequence[Fact] = (),
    otherwise: str = "",
) -> str:
    """Put drawings on a page that needs no other file and no network.

    Args:
        title: what it shows, as plain text.
        sections: its parts; one without parts is left out.
        told: a line below the title.
        facts: numbers that stand before all others.
        otherwise: HTML for readers whose browser runs no script, such as ``_repr_html_()`` of the
            report.
    """
    shown = [section for section in sections if section[2]]
    drawings: list[Drawing] = []
    bodies, links = "", ""
    for i, (heading, text, parts) in enumerate(shown):
        links += f'<a href="#part-{i}">{escaped(heading)}</a>'
        bodies += (
            f'<section id="part-{i}" aria-labelledby="title-{i}"><h2 id="title-{i}">'
            f'{escaped(heading)}</h2><p class="told">{escaped(text)}</p>'
        )
        for part in parts:
            if isinstance(part, str):
                bodies += f'<div class="part wide">{part}</div>'
            else:
                bodies += f'<div class="drawn {part["kind"]}" data-drawing="{len(drawings)}"></div>'
                drawings.append(part)
        bodies += "</section>\n"
    body = (
        # scripts take the name space of drawings from here: spelled out, it is an address
        '<svg id="space" width="0" height="0" aria-hidden="true"></svg>\n'
        f'<p class="told">{escaped(told)}</p>\n'
        f'<dl class="facts">{"".join(_fact(*fact) for fact in facts)}</dl>\n'
        f'<nav aria-label="Parts of this page">{links}'
        '<button type="button" id="ask" aria-haspopup="dialog">Keys <kbd>?</kbd></button></nav>\n'
        f"<noscript><p>Charts and search need JavaScript.</p>{otherwise}</noscript>\n"
        f"{bodies}"
        f'<script type="application/json" id="data">{_json(drawings)}</script>\n'
        f"<script>{_script()}</script>"
    )
    return page(title, body, head=_head())


def _fact(name: str, value: str, detail: str, is_bad: bool) -> str:
    bad = ' class="bad"' if is_bad else ""
    more = f'<dd class="detail">{escaped(detail)}</dd>' if detail else ""
    return f"<div{bad}><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>{more}</div>"


def _json(drawings: Sequence[Drawing]) -> str:
    named: dict[str, list[str]] = {}
    for drawing in drawings:
        for way, names in drawing["coloured"].items():
            named.setdefault(way, []).extend(names)
    colours = {way: colours_of(names) for way, names in named.items()}
    # the names are in the drawings as well
    drawn = [{**drawing, "coloured": None} for drawing in drawings]
    data = _shown({"colours": colours, "drawings": drawn})
    # A name may end the script, or begin a comment in it. JSON can spell that otherwise.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _shown(value: Any) -> Any:
    """The data with each text as the script may put it on the page."""
    if isinstance(value, str):
        return visible(value.expandtabs())
    if isinstance(value, dict):
        return {_shown(key): _shown(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(inner) for inner in value]
    return value


@cache
def _script() -> str:
    texts = "\n".join(map(_text_of, _SCRIPTS))
    return f'"use strict";\n(() => {{\n{texts}}})();\n'


@cache
def _head() -> str:
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    styles = _text_of("drawn.css")
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{styles}</style>'
    )


def _text_of(name: str) -> str:
    return files("tenure._show._drawn").joinpath(name).read_text("utf-8")
