"""What every report can do: show itself wherever it is printed, and outlive its process as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tenure._errors import ProfilerUsageError, ReportFormatError

from ._part import Part, in_html, in_text
from ._plain import plain, restored, shortened

if TYPE_CHECKING:
    from rich.console import Group

_HOME = "tenure."


class Shown:
    """Something that shows itself: as text, in a rich terminal, in a notebook.

    A class states its parts in ``_parts``, and whether a blank line is between these.
    """

    __slots__ = ()
    _is_spaced: ClassVar[bool] = False

    def _parts(self) -> Sequence[Part]:
        raise NotImplementedError

    def text(
        self, *, top: int | None = None, sort: str | None = None, width: int | None = None
    ) -> str:
        """The report as lines, with other rows than ``print`` shows.

        Args:
            top: how many rows of each table are shown, the rest being summed up in one more;
                without it 20, in a recording 10.
            sort: the heading of the column that rows are sorted by: figures the largest first,
                names by the alphabet. Tables without that column keep their order.
            width: the columns of a line; without it those of the terminal, and 80 where there is
                none.

        Raises:
            ProfilerUsageError: no table has such a column, or ``top`` is below 0.
        """
        return in_text(self.rich(top=top, sort=sort), width)

    def __str__(self) -> str:
        return self.text()

    def rich(self, *, top: int | None = None, sort: str | None = None) -> Group:
        """The same lines for rich, in colours; the arguments are those of `text`."""
        from rich.console import Group

        parts = self._parts()
        if top is not None and top < 0:
            raise ProfilerUsageError(f"top={top} is no number of rows. Pass 0 or more.")
        known = dict.fromkeys(heading for part in parts for heading in part.sorts())
        if sort is not None and sort not in known:
            there = f"There are {', '.join(map(repr, known))}" if known else "It has no tables"
            raise ProfilerUsageError(f"No table of this report has a column {sort!r}. {there}.")
        arranged = [part.arranged(top, sort) for part in parts]
        if not self._is_spaced:
            return Group(*arranged)
        return Group(*[each for part in arranged for each in ("", part)][1:])

    def __rich__(self) -> Group:
        return self.rich()

    def _repr_html_(self) -> str:
        return in_html(self.rich())


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
    kind = data.get("format") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(kind, str) or not kind.startswith(_HOME):
        raise ReportFormatError(
            f"{reader} got {shortened(data)}, which is no report of tenure. Pass the dictionary "
            "that to_dict() gave, as json.load() reads it from a file."
        )
    if kind != _HOME + cls.__name__:
        raise ReportFormatError(
            f"{reader} got {kind!r}, which is another kind of report. Read it with "
            f"{kind.removeprefix(_HOME)}.from_dict()."
        )
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= cls._version:
        raise ReportFormatError(
            f"{reader} got version {shortened(version)} of {kind!r}, and this tenure knows version "
            f"{cls._version}. Read it with the tenure that wrote it, or update this one."
        )
