"""A page of HTML that stands alone: it needs no other file and no network, and can be printed.

Invariant: the page runs nothing but its own scripts. Its policy forbids anything else, so that a
name which got through as markup could do nothing.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from tenure._visible import visible

from ._colours import NAMED, OTHERS
from ._part import escaped

_SCRIPTS = ("page.js", "time_axis.js", "bands.js", "flame.js", "begin.js")


def drawn_page(title: str, timeline: Mapping[str, Any], body: str) -> str:
    """Put the HTML of a report below charts of live bytes, which scripts of the page draw.

    Args:
        title: what it shows, as plain text.
        timeline: ``TimelineReport.to_dict()``, or its ``"devices"`` alone.
        body: HTML of the report; readers whose browser runs no script see this alone.
    """
    data = json.dumps(_shown({**timeline, "named": NAMED, "others": OTHERS}), allow_nan=False)
    packed = base64.b64encode(gzip.compress(data.encode(), mtime=0)).decode()
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    shown = escaped(title)
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{shown}</title>\n<style>{_text_of('page.css')}</style>\n</head>\n"
        f"<body>\n<h1>{shown}</h1>\n"
        # scripts take the name space of drawings from here: spelled out, it is an address
        '<svg id="space" width="0" height="0" aria-hidden="true"></svg>\n'
        f'<noscript><p>Charts need JavaScript.</p></noscript>\n<main id="drawn"></main>\n{body}\n'
        f'<script type="application/octet-stream" id="data">{packed}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
    # A name that is no text, as Python reads files' names, can't be written to a file.
    return page.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> Any:
    """Return the data with each text as the script may put it on the page."""
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
    return f'"use strict";\n(async () => {{\n{texts}}})();\n'


def _text_of(name: str) -> str:
    return files("tenure._show").joinpath("_drawn", name).read_text("utf-8")
