"""What was recorded, in order, and running it: the plain program, later.

Invariant: a replay calls the same functions in the same order, in the modes they were called in, so
that what they share, write and draw comes out as in the program that was recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor
from tenure._torch.writes import version_of

from ._batch_int import BatchInt, at
from ._labels import SHARED, Label

_numbers = count()


class Ref:
    """A recorded value among arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def new_number() -> int:
    """The number of another value, larger than all before."""
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
        """Those of this moment, for the host and one more kind of device."""
        kinds = ("cpu",) if kind in ("cpu", "meta") else ("cpu", kind)
        return Modes(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        """A block in which they hold."""
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


@dataclass(slots=True, eq=False)
class Entry:
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
        plains: the tensors that it takes and that were not recorded, with how often each had been
            written.
        site: where the user's program called it, where that may have to be told.
        is_done: whether it has run on the whole batch.
    """

    seq: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    modes: Modes
    outs: tuple[int | None, ...]
    reads: tuple[int, ...]
    shape: Any
    plains: tuple[tuple[Tensor, int | None], ...] = ()
    site: Any = None
    is_done: bool = False

    @property
    def made(self) -> list[int]:
        """The numbers of the tensors that it makes."""
        return [number for number in self.outs if number is not None]


class Leaf(NamedTuple):
    """A value that nothing recorded gives.

    Attributes:
        value: the tensor.
        label: where it has the samples.
        version: how often it had been written.
    """

    value: Tensor
    label: Label
    version: int | None


def leaf_of(value: Tensor, label: Label) -> Leaf:
    """A leaf as it is now."""
    return Leaf(value, label, version_of(value))


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
        spent: the numbers of values whose graph was used up.
        coupled: what says that it can't be split at all.
        into: what it became a part of.
        rng: the random state before its first call ran.
        held: what was run for its value, and has gradients that nobody asked for yet.
    """

    n_samples: int
    kind: str
    entries: list[Entry] = field(default_factory=list)
    leaves: dict[int, Leaf] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    handles: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    cuts: dict[tuple[int, int | None, int], int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    spent: set[int] = field(default_factory=set)
    coupled: str | None = None
    into: Tape | None = None
    rng: Any = None
    held: Any = None
    is_split: bool = False

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
        for name in ("leaves", "values", "handles", "cuts"):
            getattr(self, name).update(getattr(other, name))
        self.written |= other.written
        self.spent |= other.spent
        # what runs first was noted first
        self.rng = self.rng or other.rng
        self.held = self.held or other.held
        other.into = self
        for name in ("leaves", "values", "handles", "cuts", "entries"):
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

    def pending(self) -> list[Entry]:
        """The calls that have not run on the whole batch."""
        return [entry for entry in self.entries if not entry.is_done]

    def plain_leaf(self, tensor: Tensor, dim: int | None, inner: int) -> int:
        """The number of a plain tensor that has the samples in a dimension, or in none."""
        key = (id(tensor), dim, inner)
        if key not in self.cuts:
            label = SHARED if dim is None else Label("batch", dim, 1, inner)
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
        self.written &= self.leaves.keys()
        if not kept:
            self.rng = None
            self.is_split = False
        self.tidy()


def check_unwritten(entries: Iterable[Entry], leaves: Mapping[int, Leaf]) -> None:
    """Make sure that what recorded calls take is what it was when they were recorded.

    Raises:
        AdaptiveUsageError: a tensor was written to since.
    """
    taken = [(leaf.value, leaf.version) for leaf in leaves.values()]
    for entry in entries:
        # it writes into some of them itself
        if not entry.shape.writes_plain:
            taken += entry.plains
    for tensor, version in taken:
        if version_of(tensor) != version:
            raise AdaptiveUsageError(
                f"{describe_tensor(tensor)} was written to after a call of torch that takes it was "
                "recorded by lazy() and before that was computed, as by an optimizer: the result "
                "would be another one. Compute what was recorded first: read it, call value() or "
                "backward(), or let go of it."
            )


def filled(value: Any, get: Callable[[int], Any], n_samples: int | None) -> Any:
    """Arguments with what was recorded in its place.

    Args:
        value: the arguments as they were stored.
        get: gives a value by its number.
        n_samples: how many samples there are; None: as many as when it was recorded.
    """
    kind = type(value)
    if kind is Ref:
        return get(value.number)
    if kind is BatchInt:
        return int(value) if n_samples is None else at(value, n_samples)
    if kind is tuple:
        return tuple([filled(each, get, n_samples) for each in value])
    if kind is list:
        return [filled(each, get, n_samples) for each in value]
    if kind is dict:
        return {key: filled(each, get, n_samples) for key, each in value.items()}
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return slice(*[filled(each, get, n_samples) for each in parts])
    return value


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in what a function of torch returned, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in flat_tensors(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in flat_tensors(each)]
    return []


class Replayed(NamedTuple):
    """Calls to be run, and what may be let go after each.

    Attributes:
        entries: the calls, in order.
        last: the numbers that are used by a call for the last time, by its place.
    """

    entries: list[Entry]
    last: list[list[int]]


def replayed(entries: Iterable[Entry], kept: Iterable[int]) -> Replayed:
    """Find out when each value is used for the last time.

    Args:
        entries: the calls, in order.
        kept: the numbers of values that stay.
    """
    entries = list(entries)
    last: dict[int, int] = {}
    for i, entry in enumerate(entries):
        for number in entry.reads:
            last[number] = i
        for number in entry.made:
            last.setdefault(number, i)
    for number in kept:
        last.pop(number, None)
    gone: list[list[int]] = [[] for _ in entries]
    for number, i in last.items():
        gone[i].append(number)
    return Replayed(entries, gone)


def run(
    what: Replayed,
    env: dict[int, Any],
    kind: str,
    n_samples: int | None = None,
    *,
    others: Mapping[int, Leaf] | None = None,
    done: Callable[[Entry], None] | None = None,
) -> None:
    """Run calls on real tensors.

    Args:
        what: the calls.
        env: values by number; gets those that are computed.
        kind: the kind of device.
        n_samples: how many samples there are; None: as many as when it was recorded.
        others: values that are in no ``env``.
        done: called after each.
    """

    def get(number: int) -> Any:
        found = env.get(number)
        return others[number].value if found is None and others else found

    at_place = iter(what.last)
    for modes, group in groupby(what.entries, key=_modes_of):
        with modes.entered(kind):
            for entry in group:
                out = entry.func(
                    *filled(entry.args, get, n_samples), **filled(entry.kwargs, get, n_samples)
                )
                if entry.outs:
                    _take(env, entry, out)
                out = None
                if done is not None:
                    done(entry)
                for number in next(at_place):
                    env.pop(number, None)


def _take(env: dict[int, Any], entry: Entry, out: Any) -> None:
    made = zip(entry.outs, flat_tensors(out), strict=True)
    env.update({number: tensor for number, tensor in made if number is not None})


def _modes_of(entry: Entry) -> Modes:
    return entry.modes
