"""Memory as a tree of the calls that made it, the largest branch first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from tenure._show import Paragraph, Part, Report
from tenure._text import counted, format_bytes

from .._timeline import Track

_LEAST_SHARE = 0.01
# what is deeper stands below each other: its names need the room
_MOST_INDENT = 20
UNKNOWN = "unknown"
"""What is called so that has neither a line nor a category."""
_SCOPE = "scope "
# how a snapshot of torch and a timeline say it
_NO_SCOPE = ("", "outside of scopes")


@dataclass(frozen=True, slots=True)
class Branch:
    """One call, and what it led to.

    Attributes:
        name: the line, as ``"train.py:17 in step"``.
        n_bytes: the bytes that were made here or below.
        n_storages: how many storages they are.
        branches: the calls of this one, the largest first.
    """

    name: str
    n_bytes: int
    n_storages: int
    branches: tuple[Branch, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class RecordedTree(Report):
    """What was alive at the peak, or else at the end, as a tree for each device.

    Attributes:
        devices: the trees, each a branch with the device and the moment for its name.
        note: what else is to be said; can be empty.
    """

    devices: tuple[Branch, ...]
    note: str = ""

    _is_spaced = True

    def __repr__(self) -> str:
        return f"<RecordedTree of {counted(len(self.devices), 'device')}>"

    def _parts(self) -> list[Part]:
        trees = [
            Paragraph(
                f"{tree.name}: {format_bytes(tree.n_bytes)}",
                "\n".join(_lines(tree.branches, tree.n_bytes, 0)),
            )
            for tree in self.devices
        ]
        return [*trees, Paragraph("", self.note)] if self.note else [*trees]


def tree_at_peak(tracks: Iterable[Track]) -> RecordedTree:
    """Fold what was alive at the peak of each device by its scopes and stacks."""
    paths = []
    for track in tracks:
        title, rest = f"{track.device}, at its peak after {track.peak_at_s:.1f} s", track.peak_bytes
        for block in track.at_peak:
            scope = () if block.scope in _NO_SCOPE else (_SCOPE + block.scope,)
            # without a stack the category is what there is
            stack = block.stack or (block.category or UNKNOWN,)
            paths.append(((title, *scope, *stack), block.n_bytes, block.n_storages))
            rest -= block.n_bytes
        if rest > 0:
            paths.append(((title, "unexplained"), rest, 0))
    return RecordedTree(folded(paths))


def folded(paths: Iterable[tuple[tuple[str, ...], int, int]]) -> tuple[Branch, ...]:
    """Return names, outermost first, with bytes and storages, as branches."""
    groups: dict[str, list[tuple[tuple[str, ...], int, int]]] = {}
    for (name, *path), n_bytes, n in filter(itemgetter(0), paths):
        groups.setdefault(name, []).append((tuple(path), n_bytes, n))
    branches = []
    for name, inner in groups.items():
        n_bytes, n = sum(each[1] for each in inner), sum(each[2] for each in inner)
        branches.append(Branch(name, n_bytes, n, folded(inner)))
    return tuple(sorted(branches, key=lambda branch: (-branch.n_bytes, branch.name)))


def _lines(branches: tuple[Branch, ...], total: int, depth: int) -> Iterator[str]:
    least = total * _LEAST_SHARE
    for branch in branches:
        if branch.n_bytes >= least:
            yield _line(branch.n_bytes, total, depth, branch.name)
            yield from _lines(branch.branches, total, depth + 1)
    small = [branch for branch in branches if branch.n_bytes < least]
    if small:
        n_bytes = sum(branch.n_bytes for branch in small)
        yield _line(n_bytes, total, depth, f"and {len(small)} smaller")


def _line(n_bytes: int, total: int, depth: int, name: str) -> str:
    share = f"{n_bytes / total:.0%}" if total else ""
    return f"{format_bytes(n_bytes):>10} {share:>4}  {' ' * min(depth, _MOST_INDENT)}{name}"
