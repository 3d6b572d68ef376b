"""Text in the width of a terminal, broken where its reader would break it.

Invariant: no word of code is broken, and no file's name or line's number. Only what is wider alone
than its place is cut, and says so by an ellipsis.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator

from tenure._visible import visible

WITHOUT_TERMINAL = 80
ELLIPSIS = "…"
_LEAST = 40
# After what joins names in code, and before what is applied to them. A file's extension and the
# decimals of a number follow a dot as well, and belong to what stands before it.
_JOINT = re.compile(r"(?<=[/.,=+])(?!\w+:\d|\d|$)|(?<!^)(?=\[|\((?!\)))")
_PLACE = re.compile(r"(?P<folders>.*/)(?P<name>[^/]+:\d+\W*)")
# As `tenure._cells` tells a line of a notebook.
_IN_CELL = re.compile(r"Cell In\[\d+\], line \d+")
_WORD_OF_CODE = re.compile(r"\w+|\s+|.")
_ITEM = re.compile(r"\s*(- )?")


def width_of_terminal() -> int:
    """The columns of the terminal; without one, what every terminal has."""
    return max(_LEAST, shutil.get_terminal_size((WITHOUT_TERMINAL, 24)).columns)


def cell_len(text: str) -> int:
    """How many columns a text takes: characters of Chinese, for example, take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len as of_rich

    return of_rich(text)


def padded(text: str, side: str, width: int) -> str:
    """Text in a place of so many columns, at its left or its right side (``"<"``, ``">"``)."""
    spaces = " " * (width - cell_len(text))
    return text + spaces if side == "<" else spaces + text


def folded(text: str, width: int) -> list[str]:
    """Text in lines of so many columns: broken at spaces, and in code where names are joined."""
    lines = [""]
    for word in _words(visible(text)):
        lead = " " if lines[-1] else ""
        if cell_len(lines[-1] + lead + word) <= width:
            lines[-1] += lead + word
            continue
        # what fits on a line of its own is not broken
        parts = [word] if cell_len(word) <= width else _parts_of(word, width)
        if lines[-1]:
            lines.append("")
        for part in parts:
            if cell_len(lines[-1] + part) > width and lines[-1]:
                lines.append("")
            lines[-1] += part
    return lines


def wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of text in so many columns: an item hangs by its dash, and what is indented by more."""
    for line in visible(text).split("\n"):
        match = _ITEM.match(line)
        assert match is not None
        lead = match.group()
        hanging = " " * (len(lead) + 2 * (bool(lead) and match[1] is None))
        first, *others = folded(line[len(lead) :], width - len(hanging))
        yield f"{lead}{first}".rstrip()
        yield from (f"{hanging}{other}" for other in others)


def least_width(text: str) -> int:
    """The narrowest place in which nothing of a text would have to be cut."""
    return max(cell_len(part) for word in _words(text) for part in _parts_of(word, 1, _whole))


def _words(text: str) -> list[str]:
    """A text between its spaces; a line of a notebook's cell, which has some, is one word."""
    joined = _IN_CELL.sub(lambda match: match[0].replace(" ", "\0"), text)
    return [word.replace("\0", " ") for word in joined.split(" ")]


def cut(text: str, width: int) -> str:
    """Code in one line: what is too much is left out at its end."""
    text = visible(text.expandtabs())
    if cell_len(text) <= width:
        return text
    shown = ""
    for word in _WORD_OF_CODE.findall(text):
        if cell_len(shown + word) + 1 > width:
            break
        shown += word
    return f"{shown.rstrip()}{ELLIPSIS}"


def _place_in(word: str, width: int) -> str:
    """A file and a line in so many columns: as many of its folders as there is room for."""
    match = _PLACE.fullmatch(word)
    if match is None or cell_len(word) <= width:
        return word
    folders = match["folders"].split("/")[:-1]
    shorter = ("/".join([ELLIPSIS, *folders[i:], match["name"]]) for i in range(1, len(folders)))
    least = f"{ELLIPSIS}/{match['name']}"
    return next((shown for shown in shorter if cell_len(shown) <= width), least)


def _cut_apart(part: str, width: int) -> list[str]:
    # a name that alone is wider than the terminal would be broken by that
    from rich.cells import chop_cells

    return chop_cells(part, width)


def _whole(part: str, width: int) -> list[str]:
    return [part]


def _parts_of(
    word: str, width: int, cut_part: Callable[[str, int], list[str]] = _cut_apart
) -> list[str]:
    """What a word that is wider than its line is broken into."""
    if _PLACE.fullmatch(word):
        # a part of a path leads nowhere: what is left of it stays in one piece
        shown = _place_in(word, width)
        return [shown] if cell_len(shown) <= width else cut_part(shown, width)
    parts = _JOINT.split(word)
    return [each for p in parts for each in ([p] if cell_len(p) <= width else cut_part(p, width))]
