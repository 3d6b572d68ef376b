"""Where to look in a chain of exceptions, one step at a time, whatever a subclass overrides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The interpreter's own slots: a subclass may shadow the names with properties that raise.
_CAUSE: Any = vars(BaseException)["__cause__"]
_CONTEXT: Any = vars(BaseException)["__context__"]
_SUPPRESS: Any = vars(BaseException)["__suppress_context__"]
_MEMBERS: Any = vars(BaseExceptionGroup)["exceptions"]


@dataclass(frozen=True, slots=True)
class Link:
    """An exception of a chain, and the one above it, through which it was reached."""

    exception: BaseException
    above: Link | None

    def path(self) -> list[Link]:
        """The links from the top of the chain to this one."""
        return list(self._upwards())[::-1]

    def _upwards(self) -> Iterator[Link]:
        link: Link | None = self
        while link is not None:
            yield link
            link = link.above


def all_below(exc: BaseException) -> list[BaseException]:
    """The members of a group, the cause, and the context, also where it is suppressed."""
    below = list(_MEMBERS.__get__(exc)) if issubclass(type(exc), BaseExceptionGroup) else []
    below += [_CAUSE.__get__(exc), _CONTEXT.__get__(exc)]
    return [other for other in below if other is not None]


def links_below(link: Link) -> list[Link]:
    """The members of a group, the cause, and the context unless it is suppressed, in this order."""
    exc = link.exception
    below = list(_MEMBERS.__get__(exc)) if issubclass(type(exc), BaseExceptionGroup) else []
    below.append(_CAUSE.__get__(exc))
    if not _SUPPRESS.__get__(exc):
        below.append(_CONTEXT.__get__(exc))
    return [Link(other, link) for other in below if other is not None]
