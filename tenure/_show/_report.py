"""What every report can do: show itself wherever it is printed, and outlive its process as data."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tenure._errors import ReportFormatError

from ._plain import plain, restored
from ._table import Part

if TYPE_CHECKING:
    from rich.console import RenderableType

_HOME = "tenure."


class Shown:
    """Something that shows itself: as text, in a rich terminal, in a notebook.

    A class states its tables in ``_parts``. One whose plain text is laid out otherwise, or that has
    lines alone, states them in ``__str__``.
    """

    __slots__ = ()

    def _parts(self) -> Sequence[Part]:
        return ()

    def __str__(self) -> str:
        return "\n".join(part.text() for part in self._parts())

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        shown = [part.rich() for part in self._parts()]
        # Reports of lines: rich would take their brackets for markup.
        if not shown:
            return Text(str(self))
        return shown[0] if len(shown) == 1 else Group(*shown)

    def _repr_html_(self) -> str:
        parts = self._parts()
        if not parts:
            return f"<pre>{html.escape(str(self))}</pre>"
        return "".join(part.html() for part in parts)


class Report(Shown):
    """A report that can be written down, and read by another process.

    A subclass is a dataclass whose fields are what it is made of, or states both ways itself, in
    ``_facts`` and ``_of_facts``.
    """

    __slots__ = ()
    # raised when a reader of the older version would misread what is written
    _version: ClassVar[int] = 1
    # properties that are written beside the fields, for readers other than ``from_dict``
    _figures: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, object]:
        """The report as values that JSON has, with its ``"format"`` and ``"version"``."""
        head = {"format": _HOME + type(self).__name__, "version": self._version}
        return {**head, **self._facts()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Read a report that ``to_dict`` gave, in this process or in another one.

        Args:
            data: the dictionary, such as ``json.load()`` reads it from a file.

        Raises:
            ReportFormatError: it is of another kind or of a newer version, or it has been altered.
        """
        _refuse_others(cls, data)
        return cls._of_facts(data)

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = plain(self)
        return facts

    @classmethod
    def _of_facts(cls, facts: Mapping[str, object]) -> Self:
        found: Self = restored(cls, facts, cls.__name__)
        return found


def _refuse_others(cls: type[Report], data: object) -> None:
    reader = f"{cls.__name__}.from_dict()"
    # In this order: what it is at all, which kind, which version. The first that is wrong explains
    # the others.
    if not isinstance(data, Mapping):
        raise ReportFormatError(
            f"{reader} got {type(data).__name__}, and a report is a dictionary. Pass what "
            "to_dict() gave, as json.load() reads it from a file."
        )
    kind, version = data.get("format"), data.get("version")
    if kind != _HOME + cls.__name__:
        if not isinstance(kind, str) or not kind.startswith(_HOME):
            raise ReportFormatError(
                f'{reader} got a dictionary whose "format" is {kind!r}, so it is no report of '
                "tenure. Pass what to_dict() gave."
            )
        raise ReportFormatError(
            f"{reader} got {kind!r}, which is another kind of report. Read it with "
            f"{kind.removeprefix(_HOME)}.from_dict()."
        )
    if type(version) is not int or not 1 <= version <= cls._version:
        raise ReportFormatError(
            f"{reader} got version {version!r} of {kind!r}, and this tenure knows version "
            f"{cls._version}. Read it with the tenure that wrote it, or update this one."
        )
