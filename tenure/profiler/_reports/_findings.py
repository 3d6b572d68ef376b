"""What looks like a leak among storages: growth in one place, cycles, views of large storages.

A finding is a sentence with a number, and says what to do about it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tenure._heap import IN_CYCLE, without_repetitions
from tenure._text import counted, format_bytes

from .._owners import SAVED, StorageEntry

FindingKind = Literal["growth", "graph", "cycle", "view"]

# a view of less than half of a storage that is worth mentioning
_MIN_WASTED_BYTES = 4096
_MAX_ROOTS = 3
# of a container, and of a thread without a name of its own
_INDEX = re.compile(r"\[[^\]]*\]|(?<=thread Thread-)\d+")
_NUMBER = re.compile(r"\[(?!')[^\]]*\]")
# of an error that is kept, and of hooks that are registered again and again
_IN_TRACEBACK = re.compile(r" in \S+\(\): local ")
_IN_HOOKS = re.compile(r"(?<!\[…\]), held by [^,]*_hooks(\[…\])?(,|$)")
_ADVICE = {
    "graph": "Call backward(), or keep loss.detach() or loss.item() instead of the loss.",
    "cycle": "gc.collect() frees it; break the cycle, or open a scope around what makes it.",
    "view": "Keep a clone() of the part that is needed.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that looks like a leak.

    Attributes:
        kind: "growth" where several new tensors are in one container or place; "graph" where
            graphs of autograd stay alive; "cycle" where only a reference cycle holds a tensor;
            "view" where a small view keeps a large storage alive.
        what: the tensor or place, by name.
        text: what was found.
        n_bytes: the bytes at stake.
    """

    kind: FindingKind
    what: str
    text: str
    n_bytes: int

    def __str__(self) -> str:
        advice = advice_of_growth(self.what) if self.kind == "growth" else _ADVICE[self.kind]
        return f"{self.text}. {advice}"


def find_growth(new: Sequence[StorageEntry]) -> tuple[Finding, ...]:
    """Places where several tensors came to be, and graphs that came to stay."""
    by_place: dict[str, list[int]] = {}
    for entry in new:
        place = place_of(entry.owner.name)
        # A place is a name with an index in it; without one, nothing says that more will come
        # there. Without a kind the name is a model's, an optimizer's or a node's, which grow by
        # what they do.
        if place != entry.owner.name and entry.kind not in ("", "cycle"):
            by_place.setdefault(place, []).append(entry.owner.n_bytes)
    found = [
        _finding("growth", place, f"{place} grew by {len(sizes)} tensors", sum(sizes))
        for place, sizes in by_place.items()
        if len(sizes) > 1
    ]
    saved = [entry.owner for entry in new if entry.owner.category == SAVED]
    roots = dict.fromkeys(place_of(row.graph) for row in saved if row.graph is not None)
    # A graph that came with nothing saved costs nothing to keep.
    if saved and roots:
        names = ", ".join(list(roots)[:_MAX_ROOTS]) + (", …" if len(roots) > _MAX_ROOTS else "")
        text = f"{names} keep graphs of autograd alive, with {counted(len(saved), 'storage')}"
        found.append(_finding("graph", names, text, sum(row.n_bytes for row in saved)))
    return _ranked(found)


def find_standing(entries: Sequence[StorageEntry]) -> tuple[Finding, ...]:
    """Cycles, and views of large storages."""
    found, garbage = [], defaultdict(list)
    for entry in entries:
        row, wasted = entry.owner, entry.owner.n_bytes - entry.shown_bytes
        if entry.kind == "cycle":
            garbage[cycle_of(row.name)].append(row)
        # Both bounds: a small tensor wastes little, and of a large one a kept half is no waste.
        if wasted >= max(_MIN_WASTED_BYTES, entry.shown_bytes):
            shown, kept = format_bytes(entry.shown_bytes), format_bytes(row.n_bytes)
            text = f"{row.name} shows {shown} and keeps {kept} alive"
            found.append(Finding("view", row.name, text, wasted))
    for cycle, rows in garbage.items():
        name = rows[0].name if len(rows) == 1 else cycle
        n_bytes = sum(row.n_bytes for row in rows)
        text = f"{name} is garbage that waits for the collector"
        found.append(_finding("cycle", name, text, n_bytes))
    return _ranked(found)


def _finding(kind: FindingKind, what: str, text: str, n_bytes: int) -> Finding:
    return Finding(kind, what, f"{text}, {format_bytes(n_bytes)}", n_bytes)


def _ranked(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: (-finding.n_bytes, finding.text)))


def cycle_of(name: str) -> str:
    """Return the object that a reference cycle holds, of the name of a tensor in it."""
    return place_of(name.removesuffix(IN_CYCLE).partition(".")[0]) + IN_CYCLE


def place_of(name: str) -> str:
    """Return the place that a name tells of, its indices and repetitions left out."""
    return without_repetitions(_INDEX.sub("[…]", name))


def keyed_place_of(name: str) -> str:
    """Return the same with the keys that are names left in: ``history['loss'][…]``."""
    return _NUMBER.sub("[…]", name)


def advice_of_growth(place: str, otherwise: str = "") -> str:
    """Return what to do about a place that grows."""
    if place.endswith(IN_CYCLE):
        return _ADVICE["cycle"]
    if _IN_TRACEBACK.search(place):
        return "Keep str(error), or error.with_traceback(None)."
    if _IN_HOOKS.search(place):
        return "Keep the handle of each hook, and call handle.remove()."
    return otherwise or "Bound it, or keep numbers instead of tensors."
