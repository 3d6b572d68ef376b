"""Recorded values that share their memory: which of these a call writes, and which it touches."""

from __future__ import annotations

from collections.abc import Mapping

from .._tape import Entry


def written_groups(entry: Entry, views: Mapping[int, int]) -> set[int]:
    """What a call writes into, as the first values that have that memory."""
    if not entry.shape.changed:
        return set()
    given: list[int] = list(dict.fromkeys(entry.reads))
    return {views.get(given[i], given[i]) for i in entry.shape.changed if i < len(given)}


def touched_groups(entry: Entry, views: Mapping[int, int]) -> set[int]:
    """What a call reads, makes or writes, as the first values that have that memory."""
    return {views.get(n, n) for n in (*entry.reads, *entry.made)}
