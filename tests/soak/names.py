"""Names that would be markup, commands of a terminal, or another line: a report only shows them."""

import io
import json
import re
from html.parser import HTMLParser

from rich.console import Console

from tenure import ReportFormatError

from ..show.test_reports import WRITTEN

HOSTILE = {
    "markup": "</td><script>alert(1)</script><img src=x onerror=alert(1)>",
    "an entity": "&lt;blink&gt;\"'><blink>",
    "markup of rich": "[bold red]x[/bold red][link=https://example.org]y[/link]",
    "a terminal's title": "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
    "a C1 command": "\x9b31mred\x90q\x9c",
    "a line": "one\r\ntwo\x0bthree\x85four\u2028five",
    "null": "nu\0ll\x08\x7f",
    "half a character": "half \ud800 and \udfff",
    "right to left": "\u202eevil\u202c \u2066x\u2069 \u200f\u061c",
    "nothing seen": "\ufeff\u200b\u2060",
}
# a line feed ends a line of the report, and nothing else does
_SEEN_BY_NOBODY = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ud800-\udfff]"
)


class _Tags(HTMLParser):
    """The tags of names, and those that have commands."""

    def __init__(self, markup):
        super().__init__()
        self.found = set()
        self.feed(markup)

    def handle_starttag(self, tag, attributes):
        commands = tuple(sorted(name for name, _ in attributes if name.startswith("on")))
        if commands or tag in ("script", "img", "blink"):
            self.found.add((tag, *commands))


def _places(facts, path=()):
    """Where texts stand in the facts of a report: as values, and as names of values."""
    if isinstance(facts, str):
        yield path
    elif isinstance(facts, dict):
        for key, value in facts.items():
            yield from _places(value, (*path, key))
    elif isinstance(facts, list):
        for i, value in enumerate(facts):
            yield from _places(value, (*path, i))


def _with(facts, path, text):
    if not path:
        return text
    changed = dict(facts) if isinstance(facts, dict) else list(facts)
    changed[path[0]] = _with(facts[path[0]], path[1:], text)
    return changed


def wrong_in(shown, reference):
    """What a reader of a report would fall for: as text, from rich, as HTML."""
    text, markup = str(shown), shown._repr_html_()
    console = Console(file=io.StringIO(), width=100, color_system=None, legacy_windows=False)
    console.print(shown)
    for name, what in (("text", text), ("rich", console.file.getvalue()), ("HTML", markup)):
        if found := _SEEN_BY_NOBODY.findall(what):
            yield f"{name} has {found!r}"
    if more := _Tags(markup).found - _Tags(reference).found:
        yield f"HTML has tags {more}"


def run(most_places, hostile=HOSTILE):
    """Put each hostile name in at most so many places of each report: shown, refused, and wrong."""
    shown = refused = 0
    wrong = []
    for kind, report in WRITTEN.items():
        facts = json.loads(json.dumps(report.to_dict()))
        reference = report._repr_html_()
        places = [path for path in _places(facts) if path[0] != "format"]
        for path in places[:: max(1, len(places) // most_places)]:
            for what, name in hostile.items():
                try:
                    changed = type(report).from_dict(_with(facts, path, name))
                except ReportFormatError:
                    refused += 1
                    continue
                shown += 1
                where = f"{kind}, {path}, {what}"
                wrong += [f"{where}: {each}" for each in wrong_in(changed, reference)]
    return shown, refused, wrong
