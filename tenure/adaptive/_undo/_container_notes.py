"""Containers that modules hold, noted so that what is put into them can be taken back.

Invariant: only the methods of the builtin classes are called. A class of the user's may refuse to
be cleared, or may want other arguments to make a copy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class _Kind(NamedTuple):
    """How containers of a class are read and filled.

    Attributes:
        base: the class.
        read: a copy of what is in one, of a class of Python's own.
        fill: puts such a copy into one that is empty.
    """

    base: Any
    read: Callable[[Any], dict[Any, Any] | list[Any]]
    fill: Callable[[Any, Any], object]


def _fill_in_order(container: OrderedDict[Any, Any], items: dict[Any, Any]) -> None:
    for key, value in items.items():  # update() would call what a class writes over
        OrderedDict.__setitem__(container, key, value)


_KINDS = (
    _Kind(OrderedDict, lambda each: dict(OrderedDict.items(each)), _fill_in_order),
    _Kind(dict, dict.copy, dict.update),
    _Kind(list, list.copy, list.extend),
    _Kind(set, lambda each: list(set.__iter__(each)), set.update),
    _Kind(deque, lambda each: list(deque.__iter__(each)), deque.extend),
)
_CLASSES = tuple(kind.base for kind in _KINDS)


class ContainerNote(NamedTuple):
    """A container as it was.

    Attributes:
        container: it.
        kind: how it is filled.
        items: what was in it.
        attributes: the attributes that it has beside that, where its class allows them.
    """

    container: Any
    kind: _Kind
    items: dict[Any, Any] | list[Any]
    attributes: dict[str, Any] | None

    def undo(self) -> None:
        """Put back what was in it."""
        self.kind.base.clear(self.container)
        self.kind.fill(self.container, self.items)
        if self.attributes is not None:
            space = self.container.__dict__
            space.clear()
            space.update(self.attributes)


def noted_container(value: object) -> ContainerNote | None:
    """Note a dict, list, set or deque; None for anything else."""
    cls = type(value)  # isinstance() asks a weak proxy, and one of nothing raises
    if not issubclass(cls, _CLASSES):
        return None
    kind = next(kind for kind in _KINDS if issubclass(cls, kind.base))
    attributes = getattr(value, "__dict__", None)
    return ContainerNote(
        value, kind, kind.read(value), None if attributes is None else dict(attributes)
    )


def entries(items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """What stands in a plain container, with its key or number."""
    return iter(items.items()) if isinstance(items, dict) else enumerate(items)
