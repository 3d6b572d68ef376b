"""What was recorded and belongs together: calls in order, what they begin with, what is known.

Invariant: a value is kept for a call that waits or for who has a handle, and no longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._devices import NO_ACCELERATOR
from tenure._errors import AdaptiveUsageError
from tenure._storages import storage_key
from tenure._text import describe_tensor
from tenure._torch.writes import version_of
from tenure.scopes import persist

from ._meta import Label

_numbers = count()


class Ref:
    """A recorded value among arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def new_number() -> int:
    """Return the number of another value, larger than all before."""
    return next(_numbers)


class Modes(NamedTuple):
    """The modes of torch that change what a function does.

    Attributes:
        grad: whether gradients are recorded.
        inference: whether inference mode is on.
        autocast: the type of each kind of device that has autocast on.
        caches: whether autocast keeps the weights that it casts.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    caches: bool

    @staticmethod
    def now(kind: str) -> Modes:
        """Return the modes of this moment, for the host and one more kind of device."""
        kinds = ("cpu",) if kind in NO_ACCELERATOR else ("cpu", kind)
        return Modes(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        """Return a block in which they hold."""
        now = Modes.now(kind)
        with ExitStack() as block:
            if now.inference != self.inference:
                block.enter_context(torch.inference_mode(self.inference))
            if torch.is_grad_enabled() != self.grad:
                block.enter_context(torch.set_grad_enabled(self.grad))
            if (now.autocast, now.caches) != (self.autocast, self.caches):
                ours = dict(self.autocast)
                for each in sorted(ours.keys() | dict(now.autocast).keys()):
                    dtype = ours.get(each) or torch.get_autocast_dtype(each)
                    block.enter_context(
                        torch.autocast(each, dtype, each in ours, cache_enabled=self.caches)
                    )
            yield


Mark = tuple[int | None, int | None]


def mark_of(tensor: Tensor) -> Mark:
    """Return how often a tensor was written, and the memory that it has."""
    # what is written through ``.data`` counts nowhere; what is assigned to it is other memory
    return version_of(tensor), storage_key(tensor)


class Verdict(NamedTuple):
    """What a call is in a split.

    Attributes:
        kind: ``"chunk"``: runs on each part of the batch; ``"term"``: a reduction over it;
            ``"tail"``: wants all of it; ``"before"``: makes something of the batch alone, and runs
            first, on all of it.
        why: what makes it want all of it.
        labels: where the tensors that it makes have the samples.
        freezes: whether sizes are taken as the numbers that they were.
        reduces: how a term reduces: ``"sum"``, ``"mean"`` or ``"counted"``.
    """

    kind: str
    why: str
    labels: tuple[Label, ...]
    freezes: bool = False
    reduces: str = ""


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One recorded call.

    Attributes:
        seq: where it stands among all.
        func: the function.
        args: its arguments, with `Ref` for recorded values.
        kwargs: the same by name.
        modes: the modes it was called in.
        outs: the numbers of the tensors it gives; None for one that it was given.
        reads: the numbers that it takes.
        shape: what is known of such calls.
        plains: the tensors that it takes and that were not recorded, with what each was: see
            `mark_of`.
        site: where the user's program called it, where that may have to be told.
        is_done: whether it has run on the whole batch.
        verdict: what it is in a split, once that was tried.
    """

    seq: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    modes: Modes
    outs: tuple[int | None, ...]
    reads: tuple[int, ...]
    shape: Any
    plains: tuple[tuple[Tensor, Mark], ...] = ()
    site: Any = None
    is_done: bool = False
    verdict: Any = None

    @property
    def made(self) -> list[int]:
        """The numbers of the tensors that it makes."""
        return [number for number in self.outs if number is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it takes and that were not recorded."""
        return [tensor for tensor, _ in self.plains]

    def written(self, views: Mapping[int, int]) -> set[int]:
        """Return what it writes into, as the first values that have that memory."""
        if not self.shape.changed:
            return set()
        given: list[int] = list(dict.fromkeys(self.reads))
        return {views.get(given[i], given[i]) for i in self.shape.changed if i < len(given)}

    def touched(self, views: Mapping[int, int]) -> set[int]:
        """Return what it reads, makes or writes, as the first values that have that memory."""
        return {views.get(n, n) for n in (*self.reads, *self.made)}


def makers_of(
    entries: Iterable[RecordedCall],
    numbers: Iterable[int],
    views: Mapping[int, int],
    *,
    statistics: bool = False,
) -> list[RecordedCall]:
    """Return those calls that make some values, or write into their memory, in order.

    Args:
        entries: the calls.
        numbers: the values.
        views: for values that share the memory of an earlier one the first of those.
        statistics: whether also those that write into what was not recorded.
    """
    wanted = {views.get(n, n) for n in numbers}
    found = []
    for entry in reversed(list(entries)):
        gives = {views.get(n, n) for n in entry.made} | entry.written(views)
        if gives & wanted or (statistics and entry.shape.writes_plain):
            found.append(entry)
            wanted |= {views.get(n, n) for n in entry.reads}
    return found[::-1]


class PlainValue(NamedTuple):
    """A value that nothing recorded gives.

    Attributes:
        value: the tensor; cut off the graph that it came with, if it came with one.
        label: where it has the samples.
        mark: what it was: see `mark_of`.
        origin: the tensor that came with a graph, which gets the gradient of the value.
    """

    value: Tensor
    label: Label
    mark: Mark
    origin: Tensor | None = None

    def given(self) -> Tensor:
        """Return the tensor as calls get it."""
        # no leaf of autograd itself, as what it stands for is none: autocast keeps what it casts
        # of leaves
        return self.value if self.origin is None else self.value.view_as(self.value)


def leaf_of(value: Tensor, label: Label) -> PlainValue:
    """Return a leaf as it is now."""
    if value.grad_fn is None:
        return PlainValue(value, label, mark_of(value))
    with persist(), torch.inference_mode(False), torch.no_grad():
        cut = value.detach().requires_grad_()
    return PlainValue(cut, label, mark_of(value), value)


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
        start: what running changes besides values, as it was before the first call ran.
        held: a loss that was run for its value, and its gradients, which nobody asked for yet.
        is_split: whether values are those of parts, without graph.
        is_joined: whether a plain tensor has a graph that leads to values.
        predicts: whether a new program begins with the size that is predicted to fit.
    """

    n_samples: int
    kind: str
    entries: list[RecordedCall] = field(default_factory=list)
    leaves: dict[int, PlainValue] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    handles: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    cuts: dict[tuple[int, Label], int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    views: dict[int, int] = field(default_factory=dict)
    spent: set[int] = field(default_factory=set)
    coupled: str | None = None
    into: Tape | None = None
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    start: Any = None
    held: Any = None
    is_split: bool = False
    is_joined: bool = False
    predicts: bool = False

    def home(self) -> Tape:
        """Return the tape that it is part of by now."""
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
        for name in ("leaves", "values", "handles", "cuts", "views", "generators"):
            getattr(self, name).update(getattr(other, name))
        self.written |= other.written
        self.spent |= other.spent
        # what runs first was noted first
        self.start = self.start or other.start
        self.held = self.held or other.held
        self.is_joined = self.is_joined or other.is_joined
        self.predicts = self.predicts or other.predicts
        other.into = self
        for name in ("leaves", "values", "handles", "cuts", "entries"):
            getattr(other, name).clear()

    def hold(self, number: int, handle: Any) -> None:
        """Note that somebody has a value from now on."""
        home = weakref.ref(self)

        def gone(_: Any) -> None:
            tape = home()
            if tape is not None:
                tape.home().forget(number)

        self.handles[number] = weakref.ref(handle, gone)

    def forget(self, number: int) -> None:
        """Forget a value that nobody has any more."""
        self.handles.pop(number, None)
        if not self.pending():
            self.values.pop(number, None)
        if not self.entries:
            self.leaves.pop(number, None)

    def note_write(self, number: int, what: str) -> None:
        """Note that a call writes into a value.

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

    def labels(self) -> dict[int, Label]:
        """Return where all values have their samples."""
        labels = {number: leaf.label for number, leaf in self.leaves.items()}
        for entry in self.entries:
            found = entry.verdict and entry.verdict.labels
            shapes = found or [meta.label for meta in entry.shape.metas]
            labels.update(zip(entry.made, shapes, strict=True))
        return labels

    def pending(self) -> list[RecordedCall]:
        """Return the calls that have not run on the whole batch."""
        return [entry for entry in self.entries if not entry.is_done]

    def plain_leaf(self, tensor: Tensor, label: Label) -> int:
        """Return the number of a plain tensor that is a leaf."""
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

    def drop_all_but(self, kept: list[RecordedCall]) -> None:
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
        if not kept:
            self.start = None
            self.generators.clear()
            self.is_split = self.is_joined = False
        self.tidy()


def check_unwritten(entries: Iterable[RecordedCall], leaves: Mapping[int, PlainValue]) -> None:
    """Make sure that what recorded calls take is what it was when they were recorded.

    Raises:
        AdaptiveUsageError: a tensor was written to since.
    """
    taken = [
        (leaf.origin if leaf.origin is not None else leaf.value, leaf.mark)
        for leaf in leaves.values()
    ]
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
