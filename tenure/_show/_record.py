"""What a record of many numbers is in short: its fields, and of the long ones how long they are."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tenure._text import counted

_MOST_ITEMS = 3
_PLAIN = (str, int, float, type(None))


class Record:
    """A dataclass, made with ``repr=False``, whose repr is a line or two whatever it holds.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(repr=False)
        ... class Levels(Record):
        ...     device: str
        ...     live_bytes: tuple[int, ...]
        >>> Levels("cpu", (0,) * 1000)
        Levels(device='cpu', live_bytes=<1000 items>)
    """

    __slots__ = ()

    def __repr__(self) -> str:
        record: Any = self
        shown = (f"{each.name}={_in_short(getattr(record, each.name))}" for each in fields(record))
        return f"{type(self).__name__}({', '.join(shown)})"


def _in_short(value: object) -> str:
    if not isinstance(value, tuple | list | dict):
        return repr(value)
    items = value.values() if isinstance(value, dict) else value
    # others may be records with records in them
    if len(value) <= _MOST_ITEMS and all(isinstance(each, _PLAIN) for each in items):
        return repr(value)
    return f"<{counted(len(value), 'item')}>"
