"""A page of HTML that stands alone: it needs no other file and no network, and can be printed."""

from __future__ import annotations

from ._part import escaped

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1c1e21; --line: #d5d8dc; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --text: #e4e6e9; --line: #3c4046; }
}
body { max-width: 60em; margin: 2em auto; padding: 0 1em; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; white-space: pre-line; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid var(--line); text-align: left; }
pre { overflow-x: auto; }
@media print {
  :root { --ground: #fff; --text: #000; --line: #999; }
  body { max-width: none; margin: 0; }
  table, svg { break-inside: avoid; }
}
"""


def page(title: str, body: str, *, head: str = "") -> str:
    """Put the HTML of reports on a page of its own.

    Args:
        title: what it shows, as plain text.
        body: HTML, such as a report's ``_repr_html_()`` gives it.
        head: HTML for the head of the page, below its own style.
    """
    shown = escaped(title)
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{shown}</title>\n<style>{_STYLE}</style>\n{head}</head>\n"
        f"<body>\n<h1>{shown}</h1>\n{body}\n</body>\n</html>\n"
    )
    # A name that is no text, as Python reads files' names, can't be written to a file.
    return text.encode("utf-8", "backslashreplace").decode()
