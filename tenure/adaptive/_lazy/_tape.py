"""The recorded program: values, the calls that make them, and how they run on real tensors.

Invariant: a value never changes. A call that writes in place makes a new value of what it writes,
and its run writes into a clone if anybody else still needs that memory. A replay calls the same
functions in the same order and modes, so that it draws and writes what the plain program would.
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

from .._undo import RngState
from ._meta import BatchInt, Label, Meta, meta_of

_numbers = count()
_Mark = tuple[int | None, int | None, bool]


def mark_of(tensor: Tensor) -> _Mark:
    """Return how often a tensor was written, the memory that it has, and if it requires grad."""
    # what is written through ``.data`` counts nowhere; what is assigned to it is other memory
    return version_of(tensor), storage_key(tensor), tensor.requires_grad


class Value:
    """A tensor of the program that was recorded, and what stands for it in recorded arguments.

    Attributes:
        meta: what is known of it without its data.
        label: where it has the samples.
        root: a number that values in the same memory have.
        tensor: it, on the whole batch, as far as that is known.
        origin: the tensor with a graph that ``tensor`` was cut off, which gets its gradient.
        mark: what it was, if no call makes it: see `mark_of`.
        is_spent: whether its graph was used up.
    """

    __slots__ = (
        "__weakref__", "is_spent", "label", "mark", "meta", "origin", "root", "tensor",
    )  # fmt: skip

    def __init__(self, meta: Meta, root: Value | None = None) -> None:
        self.meta, self.label = meta, meta.label
        self.root: int = next(_numbers) if root is None else root.root
        self.tensor: Tensor | None = None
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

    def cut(self) -> Any:
        """Return it as calls get it."""
        # no leaf of autograd itself, as what it stands for is none: autocast keeps what it casts
        # of leaves
        if self.origin is None or self.tensor is None:
            return self.tensor
        return self.tensor.view_as(self.tensor)

    def settle(self) -> None:
        """Make it a value that no call makes, without the graph that it came with."""
        assert self.tensor is not None
        self.tensor, self.origin = self.tensor.detach(), None
        self.mark = mark_of(self.tensor)


class Handle(Tensor):
    """A tensor that was recorded, as the recording sees it."""

    _tape: Tape
    _value: Value
    _taken: tuple[Value, Any] | None = None
    """Of a view that an index gave: the value that it is of, and the index."""

    @classmethod
    def _of(cls, tape: Tape, value: Value) -> Self:
        """Return a handle of a recorded value."""
        meta = value.meta
        made: Self = make_wrapper(
            cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device,
            requires_grad=meta.requires_grad,
        )  # fmt: skip
        made._tape, made._value = tape, value
        tape.handles[value] = made
        return made


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


# --- calls


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
        now, ours = Modes.now(), dict(self.autocast)
        with ExitStack() as block:
            if now.inference != self.inference:
                block.enter_context(torch.inference_mode(self.inference))
            block.enter_context(torch.set_grad_enabled(self.grad))
            if (now.autocast, now.caches) != (self.autocast, self.caches):
                for kind in sorted(ours.keys() | dict(now.autocast).keys()):
                    dtype = ours.get(kind) or torch.get_autocast_dtype(kind)
                    how = torch.autocast(kind, dtype, kind in ours, cache_enabled=self.caches)
                    block.enter_context(how)
            yield


class Out(int):
    """The place of a tensor in what a call gives; below zero one that it was given."""


@dataclass(slots=True, eq=False)
class Shape:
    """The results of calls that are alike; it holds no tensor.

    Attributes:
        out: what they give, with an `Out` for each tensor.
        metas: the tensors that they make, and then, of each that they write, what it is from then.
        changed: the places of those that they write, among those that they read.
        aliases: for each in ``metas`` the place of the tensor given that it shares memory with.
        cuts: which plain tensors are cut with the batch.
        why: what makes it want all of the batch; if nothing, only running it on samples tells.
        writes_plain: whether they write into a tensor that was not recorded.
        verdicts: what it is in a split, by the labels of what it reads: see `judge`.
    """

    out: Any
    metas: tuple[Meta, ...]
    changed: tuple[int, ...]
    aliases: tuple[int | None, ...]
    cuts: dict[int, Label]
    why: str = ""
    writes_plain: bool = False
    verdicts: dict[Any, Any] = field(default_factory=dict)


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
        made: the values that it makes, and those of what it has written.
        marks: what each of its tensors was: see `mark_of`.
        is_done: whether it has run on the whole batch.
        verdict: what it is in a split: see `judge`; None if that is not known yet.
        number: where it stands among all.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    modes: Modes
    reads: list[Value]
    tensors: list[Tensor]
    site: Any
    shape: Any = None
    made: list[Value] = field(default_factory=list)
    marks: list[_Mark] = field(default_factory=list)
    is_done: bool = False
    verdict: Any = None
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.func, "__name__", str(self.func))

    def __str__(self) -> str:
        return f"{self.name}() at {self.site}"

    @property
    def trains(self) -> bool:
        """True if something that it makes or writes gets gradients."""
        return any(meta.requires_grad for meta in self.shape.metas)

    def call(
        self,
        get: Callable[[Value], Any],
        n_samples: int | None,
        plains: Mapping[int, Any] | None = None,
    ) -> Any:
        """Run it on other tensors.

        Args:
            get: gives the tensor of a value.
            n_samples: how many samples there are; None: as many as when it was recorded.
            plains: tensors in place of those that were not recorded, by id.
        """

        def real(value: Any) -> Any:
            kind = type(value)
            if kind is Value:
                return get(value)
            if kind is BatchInt:
                return int(value) if n_samples is None else value.at(n_samples)
            return plains.get(id(value), value) if plains else value

        return self.func(*replaced(self.args, real), **replaced(self.kwargs, real))


def replaced(
    value: Any, function: Callable[[Any], Any], containers: list[Any] | None = None
) -> Any:
    """Return arguments, or a result, with what a function gives for each object in containers.

    Args:
        value: the arguments, or the result.
        function: gets each object that is no container.
        containers: gets what tells the containers from others.
    """
    kind = type(value)
    is_sequence = isinstance(value, tuple | list)
    if containers is not None and (is_sequence or kind in (dict, slice)):
        containers.append((kind, *(value if kind is dict else [len(value)] if is_sequence else [])))
    if kind is dict:
        return {key: replaced(each, function, containers) for key, each in value.items()}
    if kind is slice:
        ends = (value.start, value.stop, value.step)
        return slice(*[replaced(each, function, containers) for each in ends])
    if is_sequence:
        children = [replaced(each, function, containers) for each in value]
        if hasattr(value, "_fields"):
            return kind(*children)
        return tuple(children) if kind is torch.Size else kind(children)
    return function(value)


def outs_in(template: Any) -> list[Out]:
    """Return what stands for the tensors in what a call gives."""
    found: list[Out] = []
    replaced(template, lambda each: found.append(each) if type(each) is Out else None)
    return found


def makers_of(
    entries: Iterable[RecordedCall], values: Iterable[Value], *, statistics: bool = False
) -> list[RecordedCall]:
    """Return those calls that make some values, in order.

    Args:
        entries: the calls.
        values: what is wanted.
        statistics: whether also those that write into what was not recorded.
    """
    wanted = set(values)
    found = []
    for entry in reversed(list(entries)):
        if wanted.intersection(entry.made) or (statistics and entry.shape.writes_plain):
            found.append(entry)
            wanted.update(entry.reads)
    return found[::-1]


def of_data(entries: Iterable[RecordedCall]) -> set[RecordedCall]:
    """Return those calls that make something of the batch alone."""
    entries = list(entries)
    others = {value for value in inputs_of(entries) if value.meta.requires_grad}
    found = set()
    for entry in entries:
        trains = entry.trains or any(
            t.requires_grad or isinstance(t, nn.Parameter) for t in entry.tensors
        )
        if trains or others.intersection(entry.reads):
            others.update(entry.made)
        else:
            found.add(entry)
    return found


def inputs_of(entries: Iterable[RecordedCall]) -> list[Value]:
    """Return what calls take and none of them makes, in order."""
    found: dict[Value, bool] = {}
    for entry in entries:
        for value in entry.reads:
            found.setdefault(value, True)
        for value in entry.made:
            found.setdefault(value, False)
    return [value for value, is_input in found.items() if is_input]


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
    last = {value: entry for entry in entries for value in (*entry.reads, *entry.made)}
    for value in kept:
        last.pop(value, None)
    gone: dict[RecordedCall, list[Value]] = {entry: [] for entry in entries}
    for value, entry in last.items():
        gone[entry].append(value)
    inputs = {v: v.cut() if env.get(v) is None else env[v] for v in inputs_of(entries)}
    foreign = {storage_key(tensor) for tensor in inputs.values()}

    def is_free(tensor: Tensor, value: Value, entry: RecordedCall) -> bool:
        """Return whether nobody needs the memory of a value after a call."""
        key = storage_key(tensor)
        others = (t for v, t in env.items() if v is not value)
        return (
            last.get(value) is entry and key not in foreign and key not in map(storage_key, others)
        )

    for modes, group in groupby(entries, key=attrgetter("modes")):
        with modes._replace(grad=modes.grad and graphs).entered():
            for entry in group:
                given = {v: inputs[v] if v in inputs else env[v] for v in entry.reads}
                written = [entry.reads[i] for i in entry.shape.changed]
                for value in written:
                    if not is_free(given[value], value, entry):
                        given[value] = given[value].clone()
                is_frozen = entry.verdict is not None and entry.verdict.freezes
                out = entry.call(given.__getitem__, None if is_frozen else n_samples)
                env.update(zip(entry.made, made_by(entry, out, given), strict=True))
                del out, given
                for value in gone[entry]:
                    env.pop(value, None)
                    inputs.pop(value, None)


def made_by(entry: RecordedCall, out: Any, given: Mapping[Value, Tensor]) -> list[Tensor]:
    """Return the tensors that a call has made, and then those that it has written."""
    pairs = zip(outs_in(entry.shape.out), passed_tensors(out), strict=True)
    made = [tensor for place, tensor in pairs if place >= 0]
    return made + [given[entry.reads[i]] for i in entry.shape.changed]


# --- what belongs together


class Beginning:
    """The state besides values that a run changes, as it was before the first call ran."""

    def __init__(self, tape: Tape) -> None:
        self._number = next(_numbers)
        self._rng = RngState({v.meta.device for entry in tape.entries for v in entry.reads})
        self._rng.begin()
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def note(self, tape: Tape, entries: list[RecordedCall]) -> None:
        """Note what calls that wait will change besides."""
        self._rng.add(tape.generators.values())
        for tensor in written_by(entries):
            if id(tensor) not in self._buffers:
                with torch.no_grad(), persist():
                    self._buffers[id(tensor)] = (tensor, tensor.clone())

    def joined(self, other: Beginning) -> Beginning:
        """Return that of two tapes that have become one."""
        first, last = sorted((self, other), key=lambda each: each._number)
        first._rng.join(last._rng)
        first._buffers = last._buffers | first._buffers
        return first

    def undo(self) -> None:
        """Bring it back."""
        self._rng.undo()
        with torch.no_grad():
            for tensor, before in self._buffers.values():
                tensor.copy_(before)


@dataclass(eq=False)
class Tape:
    """Recorded calls that belong together.

    Attributes:
        n_samples: how many samples the batch has.
        entries: the calls.
        handles: those that somebody has, by value.
        cuts: the values of plain tensors that are cut with the batch, or have a graph.
        coupled: what says that it can't be split at all.
        generators: those of the user's own that calls draw from.
        start: what running changes besides values, as it was before the first call ran.
        held: a loss that was run for its value, and its gradients, which nobody asked for yet.
        written: the memory that was written, by root: values in it are not what the program has by
            now. With the root of what was written there, or -1 after several writes.
        failed: those whose computation has failed, which are computed only if they are asked for.
        is_split: whether values are those of parts, without graph.
        is_joined: whether a plain tensor has a graph that leads to values.
    """

    n_samples: int
    entries: list[RecordedCall] = field(default_factory=list)
    handles: weakref.WeakValueDictionary[Value, Handle] = field(
        default_factory=weakref.WeakValueDictionary
    )
    cuts: dict[tuple[int, Label, _Mark], Value] = field(default_factory=dict)
    coupled: str | None = None
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    start: Beginning | None = None
    held: Any = None
    failed: weakref.WeakSet[Value] = field(default_factory=weakref.WeakSet)
    written: dict[int, int] = field(default_factory=dict)
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
        for name in ("handles", "cuts", "generators", "failed", "written"):
            getattr(self, name).update(getattr(other, name))
        if self.start is not None and other.start is not None:
            self.start = self.start.joined(other.start)
        for name in ("coupled", "start", "held", "is_split", "is_joined"):
            setattr(self, name, getattr(self, name) or getattr(other, name))

    def plain_value(self, tensor: Tensor, label: Label) -> Value:
        """Return the value of a plain tensor."""
        key = (id(tensor), label, mark_of(tensor))
        if key not in self.cuts:
            self.cuts[key] = Value.known(tensor, label)
        return self.cuts[key]

    def alive(self) -> list[Value]:
        """Return the values that somebody has."""
        return list(self.handles)

    def rewrite(self, old: Value, new: Value) -> None:
        """Let who has a tensor that was written have the value that it is from now on."""
        self.held = None
        # others in that memory, which the write does not reach
        self.written[old.root] = -1 if old.root in self.written else new.root
        if (handle := self.handles.pop(old, None)) is not None:
            handle._value = new
            self.handles[new] = handle
            # autograd would record no function of its own of a tensor that requires no grad
            require_grad(handle, new.meta.requires_grad)

    def check_current(self, value: Value) -> None:
        """Make sure that no view of a value, or what it is a view of, was written.

        Raises:
            AdaptiveUsageError: one was, and that write did not reach the value.
        """
        if value.root in self.written:
            raise AdaptiveUsageError(
                "A tensor of lazy() was used, and another one in the same memory was written in "
                "place before: it is a view of that one, or that one is a view of it. The write "
                "reached only one of them. Write by index, as in x[:, 0] += 1 or x[:, 0] = 0, or "
                "clone() a view before you write."
            )

    def pending(self, root: Value) -> list[RecordedCall]:
        """Return the calls to run for a value, and what else somebody has; forget all others."""
        pending = [entry for entry in self.wanted(root) if not entry.is_done]
        # what they take may be gone, if they failed before
        if any(each.tensor is None for each in inputs_of(pending)):
            self.start_over()
            pending = self.wanted(root)
        return pending

    def wanted(self, root: Value) -> list[RecordedCall]:
        """Return the same, with those that have run.

        Statistics are written whether or not anybody has what comes of it.
        """
        # the graph of a plain tensor leads to values that nobody has
        if self.is_joined:
            return self.entries
        alive = self.alive()
        self.entries = makers_of(self.entries, [root, *alive], statistics=True)
        asked = [root, *(value for value in alive if value not in self.failed)]
        return makers_of(self.entries, asked, statistics=True)

    def begin(self, entries: list[RecordedCall]) -> None:
        """Note what calls will change, before any that has not run."""
        if self.start is None:
            self.start = Beginning(self)
        self.start.note(self, entries)

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

    def consume(self, root: Value | None = None) -> None:
        """Drop what a root was made of, or all; what somebody has of it is data from now on."""
        made = {value for entry in self.entries for value in entry.made}
        alive = [value for value in self.alive() if value in made]
        spent = made if root is None else graph_of(self.entries, root)
        for value in spent:
            value.is_spent |= value.meta.requires_grad
        # values that were not computed are those that failed
        others = [v for v in alive if v.tensor is None or (v.meta.requires_grad and v not in spent)]
        self.entries, self.held = makers_of(self.entries, others), None
        needed = {value for entry in self.entries for value in entry.reads}
        self.cuts = {key: value for key, value in self.cuts.items() if value in needed}
        if not self.entries:
            self.start = None
            self.generators.clear()
            self.is_split = self.is_joined = False
        still = {value for entry in self.entries for value in entry.made}
        for value in alive:
            if value not in still:
                value.settle()


def graph_of(entries: list[RecordedCall], root: Value) -> set[Value]:
    """Return the values that the gradient of a root flows through."""
    wanted = {root}
    for entry in reversed(entries):
        if entry.trains and wanted.intersection(entry.made):
            wanted.update(entry.made, entry.reads)
    made = {value for entry in entries for value in entry.made}
    return {value for value in wanted if value in made or value.is_spent or value is root}


def check_unwritten(entries: list[RecordedCall]) -> None:
    """Make sure that what recorded calls take is what it was when they were recorded.

    Raises:
        AdaptiveUsageError: a tensor was written to since.
    """
    taken: list[tuple[Any, _Mark, bool]] = [
        (value.tensor if value.origin is None else value.origin, value.mark, False)
        for value in inputs_of(entries)
        if value.mark is not None
    ]
    for entry in entries:
        # it writes into some of them itself
        if not entry.shape.writes_plain:
            for tensor, mark in zip(entry.tensors, entry.marks, strict=True):
                taken.append((tensor, mark, entry.modes.grad))
    for tensor, mark, has_graph in taken:
        *now, requires_grad = mark_of(tensor)
        if now != [*mark[:2]] or (has_graph and requires_grad and not mark[2]):
            raise AdaptiveUsageError(
                f"{describe_tensor(tensor)} was written to after a call of torch that takes it was "
                "recorded by lazy() and before that was computed, as by an optimizer, or was given "
                "other memory, or set to require grad: the result would be another one. Compute "
                "what was recorded first: read it, call value() or backward(), or let go of it."
            )


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
