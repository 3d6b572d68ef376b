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


def chain_of(exc: BaseException, outside: BaseException | None = None) -> Iterator[BaseException]:
    """The exception and all that it came of, suppressed or not, each once.

    Args:
        exc: what was caught.
        outside: the exception that was handled when the work began; it, and what it came of,
            belongs to the caller and is left out.
    """
    seen = ids_in(outside)
    waiting = [exc]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            # suppressed or not: a context that nobody sees holds its frames all the same
            waiting += _below(one, also_suppressed=True)


def ids_in(outside: BaseException | None) -> set[int]:
    """The identities of an exception and of all that it came of."""
    return set() if outside is None else {id(one) for one in chain_of(outside)}


def links_below(link: Link) -> list[Link]:
    """The members of a group, the cause, and the context unless it is suppressed, in this order."""
    return [Link(other, link) for other in _below(link.exception, also_suppressed=False)]


def _below(exc: BaseException, *, also_suppressed: bool) -> list[BaseException]:
    below = list(_MEMBERS.__get__(exc)) if issubclass(type(exc), BaseExceptionGroup) else []
    below.append(_CAUSE.__get__(exc))
    if also_suppressed or not _SUPPRESS.__get__(exc):
        below.append(_CONTEXT.__get__(exc))
    return [other for other in below if other is not None]
