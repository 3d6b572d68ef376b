"""What a report is made of: parts that are shown to three readers, as lines, in rich, as HTML.

Rich prints the lines of the plain text, in colours: what one reader sees, all do.
"""

from __future__ import annotations

import html
import io
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from tenure._visible import visible

from ._width import folded, width_of_terminal, wrapped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

# the text of a line piece by piece, each with its style in the words of rich
Line = Sequence[tuple[str, str]]
STRONG, FAINT, PLAIN = "bold", "dim", ""
_HTML_WIDTH = 120
_HTML = '<pre style="font-family:monospace;line-height:1.25;overflow-x:auto">{code}</pre>'


class Part(ABC):
    """A part of a report; a subclass says which lines it has in so many columns."""

    __slots__ = ()

    @abstractmethod
    def lines(self, width: int) -> Iterator[Line]:
        """Its lines, of at most ``width`` columns."""

    def html(self) -> str:
        """The part as HTML, as rich prints it."""
        return OfRich((self,)).html()

    def text(self, width: int | None = None) -> str:
        """The part as plain text, in so many columns; without a number, in those there are."""
        lines = self.lines(width_of_terminal() if width is None else width)
        return "\n".join("".join(piece for piece, _ in line).rstrip() for line in lines)

    def rich(self) -> OfRich:
        """The part for rich."""
        return OfRich((self,))

    def sorts(self) -> Collection[str]:
        """What its rows can be sorted by."""
        return ()

    def arranged(self, top: int | None, sort: str | None) -> Self:
        """With so many rows (None for all), sorted so where it can be."""
        return self


@dataclass(frozen=True, slots=True)
class OfRich:
    """Parts as rich prints them, a line of text between each two where they are ``apart``."""

    parts: Sequence[Part]
    apart: str = "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        between = self.apart.count("\n") - 1
        for i, part in enumerate(self.parts):
            blank = [()] * (between if i else 0)
            for line in (*blank, *part.lines(options.max_width)):
                # As pieces of text: brackets in plain strings are markup.
                yield Text.assemble(*line, no_wrap=True, overflow="ignore")

    def html(self) -> str:
        """The same lines and colours on a page."""
        from rich.console import Console

        console = Console(
            file=io.StringIO(),
            record=True,
            width=_HTML_WIDTH,
            force_terminal=True,
            force_jupyter=False,
            color_system="truecolor",
            legacy_windows=False,
        )
        console.print(self)
        # names come from the user's keys, and may be markup: rich escapes them
        return console.export_html(inline_styles=True, code_format=_HTML)


@dataclass(frozen=True, slots=True)
class Paragraph(Part):
    """Sentences, or lines of them; what a report says where a table has no rows to show.

    Attributes:
        title: what stands above; can be empty.
        note: the lines.
    """

    title: str
    note: str = ""

    def lines(self, width: int) -> Iterator[Line]:
        """The title and the lines, the broken ones indented as they are."""
        if self.title:
            yield from (((line, STRONG),) for line in wrapped(self.title, width))
        if self.note:
            yield from (((line, PLAIN),) for line in wrapped(self.note, width))


@dataclass(frozen=True, slots=True)
class Together(Part):
    """The parts of one report inside of another.

    Attributes:
        title: what stands above.
        parts: the parts.
    """

    title: str
    parts: Sequence[Part]

    def lines(self, width: int) -> Iterator[Line]:
        """The title and the parts."""
        yield from Paragraph(self.title).lines(width)
        for part in self.parts:
            yield from part.lines(width)

    def sorts(self) -> Collection[str]:
        """What the rows of any part can be sorted by."""
        return [heading for part in self.parts for heading in part.sorts()]

    def arranged(self, top: int | None, sort: str | None) -> Self:
        """Each part so arranged."""
        return replace(self, parts=[part.arranged(top, sort) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Figures(Part):
    """Lines whose beginnings are columns of figures: only what follows them is broken.

    Attributes:
        title: what stands above.
        rows: the figures and the text of each line.
        note: what stands below; can be empty.
    """

    title: str
    rows: Sequence[tuple[str, str]]
    note: str = ""

    def lines(self, width: int) -> Iterator[Line]:
        """The title, the lines and the note."""
        yield from Paragraph(self.title).lines(width)
        for figures, text in self.rows:
            first, *others = folded(text, width - len(figures))
            yield ((f"{figures}{first}", PLAIN),)
            yield from (((" " * len(figures) + other, PLAIN),) for other in others)
        yield from Paragraph("", self.note).lines(width)


def escaped(text: str) -> str:
    """Text that is nothing but itself on a page: no markup, and nothing that hides."""
    return html.escape(visible(text))
