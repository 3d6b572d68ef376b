"""The fields of a device's ``memory_stats()``, read and kept at the cost of what has changed.

torch makes its hundred flat names anew at each call, and sorts them; the nested form that it makes
them of is public too, where a backend has it. Names are made here of what a line has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

Stats = Mapping[str, Any]
"""As ``memory_stats_as_nested_dict()`` gives it, or flat, as ``memory_stats()`` does."""


class Allocated(NamedTuple):
    """The four figures of the allocated bytes; all 0 while a backend is not initialised."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0


def stats_of(module: Any, device: torch.device) -> Stats:
    """What a device's module tells of its memory, in the cheaper of the forms that it has."""
    read = getattr(module, "memory_stats_as_nested_dict", None) or module.memory_stats
    found: Stats = read(device)
    return found


def allocated_in(stats: Stats) -> Allocated:
    """The four figures that say what happened to the allocated bytes."""
    pools = stats.get("allocated_bytes")
    if pools is not None:
        return Allocated(**pools["all"])
    get = stats.get
    return Allocated(*(get(f"allocated_bytes.all.{figure}", 0) for figure in Allocated._fields))


def keep_largest(largest: dict[str, int], last: Stats, before: Stats, after: Stats) -> None:
    """Take an interval into the largest value of each field.

    Args:
        largest: the values so far, by name.
        last: what this was called with as ``after`` the last time; empty at the first.
        before: the fields at the start of the interval.
        after: the fields at its end.
    """
    # Most lines leave the device alone, and a hundred names need not be made to learn that.
    if after == last and after == before:
        return
    new = {
        name: figures
        for name, figures in after.items()
        if name not in last or figures != last[name] or figures != before.get(name)
    }
    # A flat peak needs the current value, which may be as it was
    start, end = (before, new) if "allocated_bytes" in after else (before, after)
    was = dict(_flat("", {name: start[name] for name in end if name in start}))
    fields = dict(_flat("", end))
    for name in fields:
        value = _at_most(was, fields, name)
        largest[name] = max(value, largest.get(name, value))


def _flat(prefix: str, stats: Stats) -> Iterator[tuple[str, int]]:
    """The fields by the names that ``memory_stats()`` gives them."""
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _at_most(before: Mapping[str, int], after: Mapping[str, int], name: str) -> int:
    stem, _, figure = name.rpartition(".")
    if figure != "peak" or after[name] > before.get(name, 0):
        return after[name]
    current = f"{stem}.current"
    return max(before.get(current, 0), after.get(current, 0))
