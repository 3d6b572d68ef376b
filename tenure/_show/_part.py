"""The parts of a report: rich lays them out, for a terminal, as plain text and as HTML.

Invariant: all three readers see the same lines, and each character of a name shows itself.
"""

from __future__ import annotations

import html
import io
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from tenure._visible import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

_WITHOUT_TERMINAL, _LEAST = 80, 40
_HTML_WIDTH = 120
_HTML = '<pre style="font-family:monospace;line-height:1.25;overflow-x:auto">{code}</pre>'
_LEAD = re.compile(r"\s*(- )?")


class Part(ABC):
    """A part of a report, as rich takes it."""

    __slots__ = ()

    @abstractmethod
    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield what rich prints."""

    def text(self, width: int | None = None) -> str:
        """Return the part as plain text."""
        return in_text(self, width)

    def sorts(self) -> Collection[str]:
        """Return the headings that its rows can be sorted by."""
        return ()

    def arranged(self, top: int | None, sort: str | None) -> Self:
        """Return the part with so many rows (None for all), sorted if it can be."""
        return self


def in_text(shown: RenderableType, width: int | None = None) -> str:
    """Return what rich prints as plain text.

    Args:
        shown: what is printed.
        width: the columns of a line; without it those of the terminal, and 80 if there is none.
    """
    if width is None:
        width = max(_LEAST, shutil.get_terminal_size((_WITHOUT_TERMINAL, 24)).columns)
    lines = _printed(shown, width).export_text().rstrip("\n").split("\n")
    return "\n".join(line.rstrip() for line in lines)


def in_html(shown: RenderableType) -> str:
    """Return what rich prints as HTML, in colours; rich escapes what is markup."""
    return _printed(shown, _HTML_WIDTH).export_html(inline_styles=True, code_format=_HTML)


def _printed(shown: RenderableType, width: int) -> Console:
    # here, because a program that prints no report should not wait for this import
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        # with a width alone rich takes 80 columns if TERM is "dumb"
        height=25,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
        legacy_windows=False,
    )
    # code is not cut
    console.print(shown, crop=False)
    return console


@dataclass(frozen=True, slots=True)
class Paragraph(Part):
    """Sentences, or lines of them.

    Attributes:
        title: the bold lines above; can be empty.
        note: the lines.
    """

    title: str
    note: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines; what does not fit on one is indented below it."""
        from rich.text import Text

        for text, style in ((self.title, "bold"), (self.note, "")):
            for line in visible(text).split("\n") if text else ():
                match = _LEAD.match(line)
                assert match is not None
                lead = match[0]
                hanging = " " * (len(lead) + 2 * lead.isspace())
                width = max(1, options.max_width - len(hanging))
                rest = Text(_broken(line[match.end() :], width), style)
                broken = rest.wrap(console, width, overflow="fold")
                yield Text(lead) + Text(f"\n{hanging}").join(broken)


def _broken(line: str, width: int) -> str:
    """Break words that are longer than a line after a dot or a slash if they have one."""
    piece = re.compile(rf".{{1,{width}}}$|.{{1,{width}}}(?<=[./])|.{{1,{width}}}")
    return re.sub(rf"\S{{{width + 1},}}", lambda word: "\n".join(piece.findall(word[0])), line)


@dataclass(frozen=True, slots=True)
class Code(Part):
    """Lines to paste, which no width breaks.

    Attributes:
        title: the line above.
        lines: the lines.
    """

    title: str
    lines: str

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield each line as it is."""
        from rich.text import Text

        yield Paragraph(self.title)
        for line in visible(self.lines).split("\n"):
            yield Text(line, no_wrap=True, overflow="ignore")


@dataclass(frozen=True, slots=True)
class Together(Part):
    """The parts of one report inside another.

    Attributes:
        title: the line above.
        parts: the parts.
    """

    title: str
    parts: Sequence[Part]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Part]:
        """Yield the title and the parts."""
        yield Paragraph(self.title)
        yield from self.parts

    def sorts(self) -> Collection[str]:
        """Return the headings of any part."""
        return [heading for part in self.parts for heading in part.sorts()]

    def arranged(self, top: int | None, sort: str | None) -> Self:
        """Return it with each part arranged."""
        return replace(self, parts=[part.arranged(top, sort) for part in self.parts])


def escaped(text: str) -> str:
    """Return text that is nothing but itself on a page: no markup, and nothing that hides."""
    return html.escape(visible(text))
