"""One file that draws itself: data as JSON that no name can break out of, and a script of our own.

Invariant: the page asks for nothing and runs nothing but this script. Its policy forbids both, so
that a name which got through as markup could neither.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from tenure._visible import visible

from .._colours import colours_of
from .._page import page
from .._part import Part, escaped
from .._report import Shown
from ._band_chart import BandChart
from ._flame import Flame
from ._grid import Grid

_SCRIPTS = ("page.js", "time_axis.js", "bands.js", "flame.js", "grid.js", "begin.js")
_STYLES = ("drawn.css",)
Drawing = BandChart | Flame | Grid


class Fact(NamedTuple):
    """A number that the page begins with, such as a peak.

    Attributes:
        name: what it is.
        value: the number.
        detail: where it is from, or which device it is of; can be empty.
        is_bad: it is shown as what went wrong.
    """

    name: str
    value: str
    detail: str = ""
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, listed at its beginning.

    Attributes:
        title: its heading, as plain text.
        told: what is seen in it, for whoever sees it for the first time.
        parts: what it shows, in this order: drawings, reports, and parts of reports.
    """

    title: str
    told: str
    parts: Sequence[Drawing | Part | Shown]


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
    shown = [section for section in sections if section.parts]
    drawings: list[Drawing] = []
    bodies = [_section(i, section, drawings) for i, section in enumerate(shown)]
    links = "".join(
        f'<a href="#part-{i}">{escaped(section.title)}</a>' for i, section in enumerate(shown)
    )
    body = [
        # scripts take the name space of drawings from here: spelled out, it is an address
        '<svg id="space" width="0" height="0" aria-hidden="true"></svg>',
        f'<p class="told">{escaped(told)}</p>' if told else "",
        f'<dl class="facts">{"".join(map(_fact, facts))}</dl>' if facts else "",
        f'<nav aria-label="Parts of this page">{links}'
        '<button type="button" id="ask" aria-haspopup="dialog">Keys <kbd>?</kbd></button></nav>',
        f"<noscript><p>Charts and search need JavaScript.</p>{otherwise}</noscript>",
        *bodies,
        f'<script type="application/json" id="data">{_json(drawings)}</script>',
        f"<script>{_script()}</script>",
    ]
    return page(title, "\n".join(filter(None, body)), head=_head())


def _section(i: int, section: Section, drawings: list[Drawing]) -> str:
    parts = []
    for part in section.parts:
        if isinstance(part, Drawing):
            parts.append(f'<div class="drawn {part.kind}" data-drawing="{len(drawings)}"></div>')
            drawings.append(part)
        else:
            shown = part._repr_html_() if isinstance(part, Shown) else part.html()
            parts.append(f'<div class="part wide">{shown}</div>')
    return (
        f'<section id="part-{i}" aria-labelledby="title-{i}"><h2 id="title-{i}">'
        f'{escaped(section.title)}</h2><p class="told">{escaped(section.told)}</p>'
        f"{''.join(parts)}</section>"
    )


def _fact(fact: Fact) -> str:
    is_bad = ' class="bad"' if fact.is_bad else ""
    detail = f'<dd class="detail">{escaped(fact.detail)}</dd>' if fact.detail else ""
    name, value = escaped(fact.name), escaped(fact.value)
    return f"<div{is_bad}><dt>{name}</dt><dd>{value}</dd>{detail}</div>"


def _json(drawings: Sequence[Drawing]) -> str:
    named: dict[str, list[str]] = {}
    for drawing in drawings:
        for way, name in drawing.names():
            named.setdefault(way, []).append(name)
    data: Any = {
        "colours": {way: colours_of(names) for way, names in named.items()},
        "drawings": [{"kind": drawing.kind, **drawing.facts()} for drawing in drawings],
    }
    data = _shown(data)
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
    texts = "\n".join(_text_of(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{texts}}})();\n'


@cache
def _head() -> str:
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    styles = "\n".join(map(_text_of, _STYLES))
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{styles}</style>'
    )


def _text_of(name: str) -> str:
    return files("tenure._show._drawn").joinpath(name).read_text("utf-8")
