"""What was recorded and belongs together: calls in order, and the values that they take and make.

Invariant: a tensor is kept for a call that waits or for who has a handle, and no longer. A replay
calls the same functions in the same order, in the modes they were called in, so that what they
share, write and draw comes out as in the program that was recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, groupby
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from tenure._containers import passed_tensors
from tenure._errors import AdaptiveUsageError
from tenure._storages import storage_key
from tenure._text import describe_tensor
from tenure._torch.swap import make_wrapper, recorded_by_autograd, require_grad
from tenure._torch.writes import version_of
from tenure.scopes import persist

from ._meta import BatchInt, Label, Meta, at, meta_of

_numbers = count()


class Value:
    """A tensor of the program that was recorded, and what stands for it in recorded arguments.

    Args:
        meta: what is known of it without its data.

    Attributes:
        meta: as given; replaced when it is written.
        label: where it has the samples.
        base: an earlier value that it is a view of.
        tensor: it, on the whole batch, as far as that is known.
        given: the tensor of the user's that it stands for.
        origin: the tensor with a graph that ``tensor`` was cut off, which gets its gradient.
        mark: what it was, if no call makes it: see `mark_of`.
        is_spent: whether its graph was used up.
    """

    __slots__ = (
        "__weakref__", "base", "given", "is_spent", "label", "mark", "meta", "origin", "tensor",
    )  # fmt: skip

    def __init__(self, meta: Meta) -> None:
        self.meta, self.label = meta, meta.label
        self.base: Value | None = None
        self.tensor: Tensor | None = None
        self.given: Tensor | None = None
        self.origin: Tensor | None = None
        self.mark: _Mark | None = None
        self.is_spent = False

    @classmethod
    def known(cls, tensor: Tensor, label: Label) -> Self:
        """Return the value of a tensor that no call makes."""
        made = cls(meta_of(tensor, label))
        made.tensor, made.mark = tensor, mark_of(tensor)
        if tensor.grad_fn is not None:
            with persist(), torch.inference_mode(False), torch.no_grad():
                made.tensor, made.origin = tensor.detach().requires_grad_(), tensor
        return made

    @property
    def root(self) -> Value:
        """The first value that has its memory."""
        return self.base or self

    def cut(self) -> Any:
        """Return it as calls get it."""
        # no leaf of autograd itself, as what it stands for is none: autocast keeps what it casts
        # of leaves
        return self.tensor if self.origin is None or self.tensor is None else _view(self.tensor)

    def settle(self) -> None:
        """Make it a value that no call makes, without the graph that it came with."""
        assert self.tensor is not None
        self.tensor, self.origin = self.tensor.detach(), None
        self.mark = mark_of(self.tensor)


def _view(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


_Mark = tuple[int | None, int | None]


def mark_of(tensor: Tensor) -> _Mark:
    """Return how often a tensor was written, and the memory that it has."""
    # what is written through ``.data`` counts nowhere; what is assigned to it is other memory
    return version_of(tensor), storage_key(tensor)


class Handle(Tensor):
    """A tensor that was recorded, as the recording sees it."""

    _tape: Tape
    _value: Value

    @classmethod
    def _of(cls, tape: Tape, value: Value) -> Self:
        """Return a handle of a recorded value."""
        meta = value.meta
        made: Any = make_wrapper(
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        made._tape, made._value = tape, value
        tape.handles[value] = made
        found: Self = made
        return found


def refuse_own_function(tensor: Handle) -> None:
    """Make sure that no function of autograd has made a tensor, past the recording.

    Raises:
        AdaptiveUsageError: one has.
    """
    node = recorded_by_autograd(tensor)
    if node is None:
        return
    name = type(node).__name__
    raise AdaptiveUsageError(
        f"A tensor of lazy() came out of {name.removesuffix('Backward')!r}, a function with a "
        "backward pass of its own (torch.autograd.Function; hooks of modules that run backward and "
        "reentrant checkpoints are such, too): its calls can't be recorded, and its gradient would "
        "be lost. Use step() for this model, or checkpoint with use_reentrant=False."
    )


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
    def now() -> Modes:
        """Return the modes of this moment, for the host and the accelerator."""
        # where the batch is on the host, too: calls may move it
        accelerator = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        return Modes(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a block in which they hold."""
        now = Modes.now()
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
        func: the function.
        args: its arguments, with a `Value` for each recorded tensor.
        kwargs: the same by name.
        modes: the modes it was called in.
        reads: the values that it takes, each once.
        tensors: the tensors that it takes and that were not recorded.
        site: where the user's program called it.
        shape: what is known of such calls.
        outs: the values of the tensors that it gives; None for one that it was given.
        made: the values of those that it makes.
        marks: what each of its tensors was: see `mark_of`.
        is_data: whether it makes something of the batch alone: see `mark_data`.
        is_done: whether it has run on the whole batch.
        verdict: what it is in a split, once that was tried.
        number: where it stands among all.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    modes: Modes
    reads: list[Value]
    tensors: list[Tensor]
    site: Any
    shape: Any
    outs: list[Value | None] = field(default_factory=list)
    made: list[Value] = field(default_factory=list)
    marks: list[_Mark] = field(default_factory=list)
    is_data: bool = False
    is_done: bool = False
    verdict: Any = None
    number: int = field(default_factory=lambda: next(_numbers))

    def __str__(self) -> str:
        name = getattr(self.func, "__name__", str(self.func))
        return f"{name}() at {self.site}" if self.site is not None else f"{name}()"

    @property
    def trains(self) -> bool:
        """Whether something that it makes or writes gets gradients."""
        return any(meta.requires_grad for meta in (*self.shape.metas, *self.shape.changed.values()))

    def written(self) -> set[Value]:
        """Return what it writes into, as the first values that have that memory."""
        return {self.reads[i].root for i in self.shape.changed if i < len(self.reads)}

    def touched(self) -> set[Value]:
        """Return what it reads, makes or writes, as the first values that have that memory."""
        return {value.root for value in (*self.reads, *self.made)}


def makers_of(
    entries: Iterable[RecordedCall], values: Iterable[Value], *, statistics: bool = False
) -> list[RecordedCall]:
    """Return those calls that make some values, or write into their memory, in order.

    Args:
        entries: the calls.
        values: what is wanted.
        statistics: whether also those that write into what was not recorded.
    """
    wanted = {value.root for value in values}
    found = []
    for entry in reversed(list(entries)):
        gives = {value.root for value in entry.made} | entry.written()
        if gives & wanted or (statistics and entry.shape.writes_plain):
            found.append(entry)
            wanted |= {value.root for value in entry.reads}
    return found[::-1]


def mark_data(entries: Iterable[RecordedCall]) -> None:
    """Note of each call whether it makes something of the batch alone."""
    entries = list(entries)
    # memory that has something else in it
    others = {value.root for value in inputs_of(entries) if value.meta.requires_grad}
    for entry in entries:
        trains = entry.trains or any(
            t.requires_grad or isinstance(t, nn.Parameter) for t in entry.tensors
        )
        entry.is_data = not trains and all(value.root not in others for value in entry.reads)
        if not entry.is_data:
            others |= {value.root for value in entry.made} | entry.written()


def inputs_of(entries: Iterable[RecordedCall]) -> list[Value]:
    """Return what calls take and none of them makes, in order."""
    found: dict[Value, bool] = {}
    for entry in entries:
        for value in entry.reads:
            found.setdefault(value, True)
        for value in entry.made:
            found.setdefault(value, False)
    return [value for value, is_input in found.items() if is_input]


@dataclass(eq=False)
class Tape:
    """What was recorded and belongs together.

    Attributes:
        n_samples: how many samples the batch has.
        entries: the calls.
        handles: those that somebody has, by value.
        cuts: the values of plain tensors that are cut with the batch, or have a graph.
        coupled: what says that it can't be split at all.
        generators: those of the user's own that calls draw from.
        start: what running changes besides values, as it was before the first call ran.
        held: a loss that was run for its value, and its gradients, which nobody asked for yet.
        failed: those whose computation has failed, which are computed only if they are asked for.
        is_split: whether values are those of parts, without graph.
        is_joined: whether a plain tensor has a graph that leads to values.
    """

    n_samples: int
    entries: list[RecordedCall] = field(default_factory=list)
    handles: weakref.WeakValueDictionary[Value, Handle] = field(
        default_factory=weakref.WeakValueDictionary
    )
    cuts: dict[tuple[int, Label], Value] = field(default_factory=dict)
    coupled: str | None = None
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    start: Any = None
    held: Any = None
    failed: weakref.WeakSet[Value] = field(default_factory=weakref.WeakSet)
    is_split: bool = False
    is_joined: bool = False

    def absorb(self, other: Tape) -> None:
        """Take another one in."""
        if other.n_samples != self.n_samples and self.coupled is None:
            self.coupled = (
                f"lazy() was given batches of {self.n_samples} and of {other.n_samples} samples "
                "that meet"
            )
        self.entries = sorted([*self.entries, *other.entries], key=attrgetter("number"))
        for handle in other.handles.values():
            handle._tape = self
        for name in ("handles", "cuts", "generators", "failed"):
            getattr(self, name).update(getattr(other, name))
        if self.start is not None and other.start is not None:
            self.start = self.start.joined(other.start)
        for name in ("coupled", "start", "held", "is_split", "is_joined"):
            setattr(self, name, getattr(self, name) or getattr(other, name))

    def plain_value(self, tensor: Tensor, label: Label) -> Value:
        """Return the value of a plain tensor."""
        key = (id(tensor), label)
        if key not in self.cuts:
            self.cuts[key] = Value.known(tensor, label)
        return self.cuts[key]

    def alive(self) -> list[Value]:
        """Return the values that somebody has."""
        return list(self.handles)

    def rewrite(self, value: Value, meta: Meta) -> None:
        """Give a value another description, as of a tensor that was written."""
        value.meta = meta
        if (handle := self.handles.get(value)) is not None:
            # autograd would record no function of its own of a tensor that requires no grad
            require_grad(handle, meta.requires_grad)

    def wanted(self, root: Value) -> list[RecordedCall]:
        """Return the calls that make a value, and what else somebody has; forget all others.

        Statistics are written whether or not anybody has what comes of it.
        """
        # the graph of a plain tensor leads to values that nobody has
        if self.is_joined:
            return self.entries
        alive = self.alive()
        self.entries = makers_of(self.entries, [root, *alive], statistics=True)
        if not self.failed:
            return self.entries
        asked = [root, *(value for value in alive if value not in self.failed)]
        return makers_of(self.entries, asked, statistics=True)

    def pending(self, root: Value) -> list[RecordedCall]:
        """Return those of them that have not run on the whole batch."""
        return [entry for entry in self.wanted(root) if not entry.is_done]

    def note_done(self, entries: list[RecordedCall], values: Mapping[Value, Any]) -> None:
        """Keep what calls gave on the whole batch, as far as somebody has it or a call needs it."""
        for entry in entries:
            entry.is_done = True
        needed = {v for entry in self.entries if not entry.is_done for v in entry.reads}
        for value in [value for entry in self.entries for value in entry.made]:
            if value not in needed and value not in self.handles:
                value.tensor = None
            elif value in values:
                value.tensor = values[value]

    def start_over(self) -> None:
        """Make it as if nothing had run."""
        for entry in self.entries:
            entry.is_done = False
            for value in entry.made:
                value.tensor = None
        self.is_split, self.held = False, None
        if self.start is not None:
            self.start.undo()
            self.start = None

    def check_write(self, value: Value, what: str) -> None:
        """Make sure that a write reaches all that shares memory with a value.

        Raises:
            AdaptiveUsageError: somebody has read another view of it, which would not be written.
        """
        read = [v for v in self.alive() if v.root is value.root and v.tensor is not None]
        is_shared = len(read) > 1 or value.root.mark is not None
        if is_shared and any(each.base is not None for each in read):
            raise AdaptiveUsageError(
                f"{what}() writes into a tensor of lazy() that another one is a view of, and "
                "the value of one of them was read before: the write would not reach both. "
                "clone() it first, or write before you read."
            )

    def forget(self, kept: list[RecordedCall]) -> None:
        """Forget calls but some."""
        self.entries, self.held = kept, None
        needed = {value for entry in kept for value in entry.reads}
        self.cuts = {key: value for key, value in self.cuts.items() if value in needed}
        if not kept:
            self.start = None
            self.generators.clear()
            self.is_split = self.is_joined = False


def check_unwritten(entries: list[RecordedCall]) -> None:
    """Make sure that what recorded calls take is what it was when they were recorded.

    Raises:
        AdaptiveUsageError: a tensor was written to since.
    """
    taken: list[tuple[Any, _Mark | None]] = [
        (value.tensor if value.origin is None else value.origin, value.mark)
        for value in inputs_of(entries)
        if value.mark is not None
    ]
    for entry in entries:
        # it writes into some of them itself
        if not entry.shape.writes_plain:
            taken += zip(entry.tensors, entry.marks, strict=True)
    for tensor, mark in taken:
        if mark_of(tensor) != mark:
            raise AdaptiveUsageError(
                f"{describe_tensor(tensor)} was written to after a call of torch that takes it was "
                "recorded by lazy() and before that was computed, as by an optimizer, or was given "
                "other memory: the result would be another one. Compute what was recorded first: "
                "read it, call value() or backward(), or let go of it."
            )


def replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return arguments, or a result, with what a function gives for each object in containers."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([replaced(each, function) for each in value])
    if kind is dict:
        return {key: replaced(each, function) for key, each in value.items()}
    if kind is slice:
        return slice(*[replaced(each, function) for each in (value.start, value.stop, value.step)])
    if isinstance(value, tuple | list):
        children = [replaced(each, function) for each in value]
        return kind(*children) if hasattr(value, "_fields") else kind(children)
    return function(value)


def call(
    entry: RecordedCall,
    get: Callable[[Value], Any],
    n_samples: int | None,
    plains: Mapping[int, Any] | None = None,
) -> Any:
    """Run a call on other tensors.

    Args:
        entry: the call.
        get: gives the tensor of a value.
        n_samples: how many samples there are; None: as many as when it was recorded.
        plains: tensors in place of those that were not recorded, by id.
    """

    def real(value: Any) -> Any:
        kind = type(value)
        if kind is Value:
            return get(value)
        if kind is BatchInt:
            return int(value) if n_samples is None else at(value, n_samples)
        return plains.get(id(value), value) if plains else value

    return entry.func(*replaced(entry.args, real), **replaced(entry.kwargs, real))


def run(
    entries: list[RecordedCall],
    env: dict[Value, Any],
    kept: Iterable[Value],
    n_samples: int | None = None,
    *,
    graphs: bool = True,
) -> None:
    """Run calls on real tensors, each of which goes when it was used for the last time.

    Args:
        entries: the calls.
        env: tensors by value; gets those that are computed.
        kept: the values that stay.
        n_samples: how many samples there are; None: as many as when it was recorded.
        graphs: whether calls that were recorded with gradients make graphs.
    """
    last = last_uses(entries, kept)

    def get(value: Value) -> Any:
        found = env.get(value)
        return value.cut() if found is None else found

    for modes, group in groupby(entries, key=attrgetter("modes")):
        with modes._replace(grad=modes.grad and graphs).entered():
            for entry in group:
                is_frozen = entry.verdict is not None and entry.verdict.freezes
                out = call(entry, get, None if is_frozen else n_samples)
                made = zip(entry.outs, passed_tensors(out), strict=True)
                env.update({value: tensor for value, tensor in made if value is not None})
                del out, made
                for value in last[entry]:
                    env.pop(value, None)


def last_uses(
    entries: list[RecordedCall], kept: Iterable[Value]
) -> dict[RecordedCall, list[Value]]:
    """Return what each call uses for the last time, but some values."""
    last = {value: entry for entry in entries for value in (*entry.reads, *entry.made)}
    for value in kept:
        last.pop(value, None)
    gone: dict[RecordedCall, list[Value]] = {entry: [] for entry in entries}
    for value, entry in last.items():
        gone[entry].append(value)
    return gone


def written_by(entries: Iterable[RecordedCall]) -> list[Tensor]:
    """Return plain tensors that calls write into, such as running statistics."""
    found = [
        tensor
        for entry in entries
        if entry.shape.writes_plain
        for tensor in entry.tensors
        if not tensor.requires_grad
    ]
    return list({id(tensor): tensor for tensor in found}.values())
