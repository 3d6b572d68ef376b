"""What stood at the peak of a device, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tenure._text import format_bytes


class PeakRow(Protocol):
    """Storages that were made alike, alive at the peak."""

    @property
    def category(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def stack(self) -> Sequence[str]: ...
    @property
    def was_before(self) -> bool: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def n_storages(self) -> int: ...


def largest_of(rows: Iterable[PeakRow]) -> str:
    """What took most: bytes of one category from one line; empty where no line is known."""
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        # what no tensor shows has no line, nor has what was there before
        if row.stack and not row.was_before and row.n_storages:
            key = row.category or "tensors", row.stack[-1]
            found[key] = found.get(key, 0) + row.n_bytes
    if not found:
        return ""
    (category, line), n_bytes = max(found.items(), key=lambda each: each[1])
    return f"{format_bytes(n_bytes)} {category}, made at {line}"
