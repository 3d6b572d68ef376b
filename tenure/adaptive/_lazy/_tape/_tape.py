"""What was recorded and belongs together: calls in order, what they begin with, what is known.

Invariant: a value is kept for a call that waits or for who has a handle, and no longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor

from .._label import Label
from ._entry import Entry, Leaf, leaf_of, mark_of, new_number
from ._proxies import Proxy, given


@dataclass(eq=False)
class Tape:
    """What was recorded and belongs together.

    Attributes:
        n_samples: how many samples the batch has.
        kind: the kind of device that it is on.
        entries: the calls.
        leaves: what they begin with, by number.
        values: what is known on the whole batch, by number.
        handles: who still has a value.
        cuts: the numbers of plain tensors that are cut with the batch.
        written: the leaves that a call writes into.
        views: for values that share the memory of an earlier one the first of those.
        spent: the numbers of values whose graph was used up.
        coupled: what says that it can't be split at all.
        into: what it became a part of.
        generators: those of the user's own that calls draw from.
        rng: the random state before its first call ran.
        held: what was run for its value, and has gradients that nobody asked for yet.
        is_split: whether values are those of parts, without graph.
        proxies: what stands for leaves that came with a graph, by number.
        is_joined: whether values are made of such leaves themselves, with their graphs.
        predicts: whether a new program begins with the size that is predicted to fit.
        is_untried: whether no memory was left to try its calls on a few samples.
    """

    n_samples: int
    kind: str
    entries: list[Entry] = field(default_factory=list)
    leaves: dict[int, Leaf] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    handles: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    cuts: dict[tuple[int, Label], int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    views: dict[int, int] = field(default_factory=dict)
    spent: set[int] = field(default_factory=set)
    coupled: str | None = None
    into: Tape | None = None
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    rng: Any = None
    held: Any = None
    is_split: bool = False
    proxies: dict[int, Proxy] = field(default_factory=dict)
    is_joined: bool = False
    predicts: bool = False
    is_untried: bool = False

    def home(self) -> Tape:
        """What it is a part of by now."""
        tape = self
        while tape.into is not None:
            tape = tape.into
        return tape

    def absorb(self, other: Tape) -> None:
        """Take another one in."""
        if other.n_samples != self.n_samples and self.coupled is None:
            self.coupled = (
                f"lazy() was given batches of {self.n_samples} and of {other.n_samples} samples "
                "that meet"
            )
        self.coupled = self.coupled or other.coupled
        self.entries = sorted([*self.entries, *other.entries], key=lambda entry: entry.seq)
        for name in (
            "leaves", "values", "handles", "cuts", "proxies", "views", "generators",
        ):  # fmt: skip
            getattr(self, name).update(getattr(other, name))
        self.written |= other.written
        self.spent |= other.spent
        # what runs first was noted first
        self.rng = self.rng or other.rng
        self.held = self.held or other.held
        self.is_joined = self.is_joined or other.is_joined
        self.predicts = self.predicts or other.predicts
        other.into = self
        for name in ("leaves", "values", "handles", "cuts", "proxies", "entries"):
            getattr(other, name).clear()

    def hold(self, number: int, handle: Any) -> None:
        """Somebody has a value from now on."""
        home = weakref.ref(self)

        def gone(_: Any) -> None:
            tape = home()
            if tape is not None:
                tape.home().forget(number)

        self.handles[number] = weakref.ref(handle, gone)

    def forget(self, number: int) -> None:
        """Nobody has a value any more."""
        self.handles.pop(number, None)
        if not self.pending():
            self.values.pop(number, None)
        if not self.entries:
            self.leaves.pop(number, None)

    def note_write(self, number: int, what: str) -> None:
        """A call writes into a value.

        Raises:
            AdaptiveUsageError: it is that of the user's tensor, and somebody has read another view
                of it, which would not be written.
        """
        first = self.views.get(number, number)
        if first not in self.leaves or first in self.written:
            return
        for other, base in self.views.items():
            is_read = other in self.values or other in self.leaves
            if base == first and is_read and other in self.handles:
                raise AdaptiveUsageError(
                    f"{what}() writes into a tensor of lazy() that another one is a view of, and "
                    "the value of one of them was read before: the write would not reach both. "
                    "clone() it first, or write before you read."
                )
        self.written.add(first)

    def given(self) -> Mapping[int, Leaf]:
        """The leaves as calls on the whole batch get them."""
        if self.is_joined:
            return self.leaves
        leaves = {n: leaf for n, leaf in self.leaves.items() if n not in self.spent}
        return self.leaves | given(leaves, self.proxies, self.values.values())

    def labels(self) -> dict[int, Label]:
        """Return where all values have their samples."""
        labels = {number: leaf.label for number, leaf in self.leaves.items()}
        for entry in self.entries:
            found = entry.verdict and entry.verdict.labels
            shapes = found or [meta.label for meta in entry.shape.metas]
            labels.update(zip(entry.made, shapes, strict=True))
        return labels

    def pending(self) -> list[Entry]:
        """The calls that have not run on the whole batch."""
        return [entry for entry in self.entries if not entry.is_done]

    def plain_leaf(self, tensor: Tensor, label: Label) -> int:
        """The number of a plain tensor that is a leaf."""
        key = (id(tensor), label)
        if key not in self.cuts:
            number = self.cuts[key] = new_number()
            self.leaves[number] = leaf_of(tensor, label)
        return self.cuts[key]

    def tidy(self) -> None:
        """Let go of values that nobody needs any more."""
        needed = {number for entry in self.pending() for number in entry.reads}
        for number in [n for n in self.values if n not in needed and n not in self.handles]:
            del self.values[number]

    def drop_all_but(self, kept: list[Entry]) -> None:
        """Forget calls, and what only they needed."""
        self.entries[:] = kept
        self.held = None
        needed = {n for entry in kept for n in entry.reads} | self.handles.keys()
        self.leaves = {n: leaf for n, leaf in self.leaves.items() if n in needed}
        self.cuts = {key: n for key, n in self.cuts.items() if n in self.leaves}
        # the value of what was written is what it is from now on
        self.written &= self.leaves.keys() if kept else set()
        alive = {n for entry in kept for n in entry.made} | self.handles.keys()
        self.views = {n: first for n, first in self.views.items() if n in alive}
        self.proxies = {n: proxy for n, proxy in self.proxies.items() if n in self.leaves}
        if not kept:
            self.rng = None
            self.generators.clear()
            self.is_split = self.is_joined = False
        self.tidy()


def check_unwritten(entries: Iterable[Entry], leaves: Mapping[int, Leaf]) -> None:
    """Make sure that what recorded calls take is what it was when they were recorded.

    Raises:
        AdaptiveUsageError: a tensor was written to since.
    """
    taken = [(leaf.value, leaf.mark) for leaf in leaves.values()]
    for entry in entries:
        # it writes into some of them itself
        if not entry.shape.writes_plain:
            taken += entry.plains
    for tensor, mark in taken:
        if mark_of(tensor) != mark:
            raise AdaptiveUsageError(
                f"{describe_tensor(tensor)} was written to after a call of torch that takes it was "
                "recorded by lazy() and before that was computed, as by an optimizer, or was given "
                "other memory: the result would be another one. Compute what was recorded first: "
                "read it, call value() or backward(), or let go of it."
            )
