"""The recorded program in micro-batches: by `step` for its gradients, in pieces for its values.

It runs in three stages, each of which reads what those before it gave. Before: made of the batch
alone, run once on all of it. Parts: run on each part of the batch, with the terms of the loss,
which are means or sums over samples. Whole: run once, on what the others give.

Invariant: a part gets its own samples of what has samples, and all of what they share; the user's
own tensors are not written; what can't be split is refused by name, and who calls undoes the rest.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tenure._errors import OutOfRetriesError, SplitMismatchError
from tenure._oom import oom_info
from tenure._text import format_bytes, listed
from tenure.scopes import persist

from .._decorators import Options, RangePart, run_pieces
from .._ranks import has_other_ranks
from .._sizes import RememberedCall
from .._step import IsolatedGradients, StepOptions, StepResult, StepSpec, leaves_of, run_step
from ._meta import names
from ._tape import (
    RecordedCall,
    Tape,
    Value,
    check_unwritten,
    inputs_of,
    makers_of,
    run,
    written_by,
)
from ._terms import count_of, reads_of_count, whole_of, widened
from ._trial import judge, mixing_error, not_splittable

Gradients = list[tuple[Tensor, Tensor]]
"""Leaves, and what a backward pass gives each."""
_BEFORE, _PARTS, _WHOLE = range(3)


def remembered(tape: Tape, what: str) -> RememberedCall:
    """Return where it is remembered which sizes of a program fit, whole or of its values."""
    # it holds this frame: a local of who uses it would be a cycle, with all that is recorded
    return RememberedCall(None, sys._getframe(), (f"lazy {what}", _place_of(tape)), None, (), {})


def _place_of(tape: Tape) -> str:
    """Return what stands for the program, whatever the number of samples."""
    calls = " ".join(getattr(entry.func, "__name__", "") for entry in tape.entries)
    return hashlib.blake2s(calls.encode(), digest_size=8).hexdigest()


def is_loss(tape: Tape, value: Value) -> bool:
    """Tell whether a split for a value gives gradients, too: it is a loss."""
    meta = value.meta
    is_number = meta.dtype.is_floating_point and math.prod(meta.shape) == 1
    return meta.requires_grad and is_number and bool(_leaves_in(tape))


def _leaves_in(tape: Tape) -> list[Tensor]:
    """Return the tensors that may get gradients."""
    plains = (tensor for entry in tape.entries for tensor in entry.tensors)
    values = (value.tensor for value in inputs_of(tape.entries))
    found = (*plains, *(tensor for tensor in values if tensor is not None))
    return leaves_of(tensor for tensor in found if tensor.requires_grad)


def origins_in(tape: Tape) -> list[Tensor]:
    """Return the tensors that came with a graph."""
    return [v.origin for v in inputs_of(tape.entries) if v.origin is not None]


@contextmanager
def collecting(tape: Tape) -> Iterator[IsolatedGradients]:
    """Open a block that makes gradients, which nobody sees."""
    isolated = IsolatedGradients(_leaves_in(tape))
    isolated.begin()
    # leaves of a graph that a tensor came with get their gradients in two passes
    isolated.hold_hooks(leaves_of(origins_in(tape)))
    try:
        yield isolated
    finally:
        isolated.undo()


class SplitProgram:
    """What was recorded, as it runs on parts.

    Args:
        tape: what was recorded.
        value: what is wanted of it.
        is_root: whether its gradients are wanted.

    Attributes:
        entries: the calls that are wanted.

    Raises:
        BatchCoupledError: it mixes samples.
        OutOfRetriesError: it can't be split for another reason.
    """

    def __init__(self, tape: Tape, value: Value, *, is_root: bool) -> None:
        coupled = "other processes take part in it, and would wait for one that splits differently"
        if has_other_ranks() or tape.coupled is not None:
            raise not_splittable(tape, tape.coupled or coupled)
        self.entries = entries = tape.wanted(value)
        judge(tape, entries)
        stages = _stages(entries)
        _refuse_writes(tape, entries, stages)
        self._before, self._alone, whole = (
            [entry for entry in entries if stages[entry] == stage] for stage in range(3)
        )
        self._tape, self._root = tape, value if is_root else None
        self._last = makers_of(whole, [value]) if is_root else []
        # values wanted later are made by them
        self._others = [entry for entry in whole if entry not in self._last]
        self._cut_last(has_terms=True)

    def _cut_last(self, *, has_terms: bool) -> None:
        """Find what parts give for the loss.

        Args:
            has_terms: whether its terms may be among that.
        """
        made = {value for entry in self._alone for value in entry.made}
        takes = made | {v for v in inputs_of(self.entries) if v.meta.requires_grad}
        terms = {entry.made[0]: entry for entry in self._last if entry.verdict.kind == "term"}
        after = [entry for entry in self._last if entry.verdict.kind != "term"]
        # counts that parts make, and slopes that are trained, are known at the end
        counted = {value for entry in terms.values() for value in reads_of_count(entry)}
        trains = any(tensor.requires_grad for entry in after for tensor in entry.tensors)
        is_late = trains or counted & made or not _is_linear(after, terms)
        if not terms or not has_terms or is_late or _taken(after, takes, self._root):
            self._add_readers()
            terms, after = {}, self._last
        # the calls that give the terms of the loss, by what they give; if there are none, what the
        # last calls take of all parts
        self._terms: dict[Value, RecordedCall] = terms
        self._taken = [] if terms else _taken(after, takes, self._root)
        self._chunk, self._tail = [*self._alone, *terms.values()], after
        if self._root is not None and not terms and not made.intersection(self._taken):
            blame = next((entry for entry in after if entry.verdict.why), None)
            if blame is not None:
                raise not_splittable(self._tape, f"{blame}: {blame.verdict.why}", blame)
            self._chunk = []
        if not self._chunk:
            raise not_splittable(self._tape, "nothing in it runs on one sample at a time")

    def _add_readers(self) -> None:
        """Let calls that use what the last ones make, as for a log, be among them.

        One may write in place what another reads.
        """
        if self._root is None:
            return
        whole = _in_order([*self._last, *self._others])
        made = {value.root for entry in self._last for value in entry.made}
        wanted = [self._root]
        for entry in self._others:
            if made & entry.touched():
                made.update(value.root for value in entry.made)
                wanted += entry.made
        self._last = makers_of(whole, wanted)
        self._others = [entry for entry in whole if entry not in self._last]

    def _prepare(self) -> None:
        """Run what is made of the batch alone, and see what is wanted of parts."""
        tape = self._tape
        check_unwritten(self.entries)
        # what parts are made of: tensors of the user's, and what is made of the batch alone
        self._data: dict[Value, Any] = {v: v.tensor for v in inputs_of(self.entries)}
        before = [value for entry in self._before for value in entry.made]
        with torch.no_grad(), persist():
            run(self._before, self._data, [*self._data, *before], graphs=False)
        self._alive = set(tape.alive())
        # of all parts, put together as they come, and what the last calls give
        self._whole: dict[Value, Any] = {}
        self._given_terms: list[Any] = []
        self._factors = self._factors_of_terms() if self._terms else {}
        if self._terms and not self._factors:
            self._cut_last(has_terms=False)
        late = self._others if self._taken else _in_order([*self._tail, *self._others])
        # statistics are written whether or not anybody has what comes of it
        self._late = makers_of(late, self._alive, statistics=True)
        made = [v for entry in self._chunk for v in entry.made if v not in self._terms]
        wanted = self._alive | {value for entry in self._late for value in entry.reads}
        self._kept = [value for value in made if value in wanted and value not in self._taken]
        counted = [value for entry in self._terms.values() for value in reads_of_count(entry)]
        self._stays = [*self._kept, *self._taken, *self._terms, *counted]

    # --- on all of the batch

    def _run(
        self, entries: list[RecordedCall], env: dict[Value, Any], kept: Iterable[Value],
        length: int | None = None,
    ) -> None:  # fmt: skip
        # step() says whether graphs are wanted: a verification and the first of two passes are
        # without, and have memory for none
        run(entries, env, kept, length, graphs=torch.is_grad_enabled())

    def _inputs_of(self, entries: list[RecordedCall]) -> dict[Value, Any]:
        """Return the tensors that no part makes, as calls get them."""
        inputs = [value for value in inputs_of(entries) if value in self._data]
        return {v: self._data[v] if v.tensor is None else v.cut() for v in inputs}

    def _finish(self) -> None:
        """Run the calls that want all of what parts gave, and give values to who has them."""
        with torch.no_grad(), persist():
            for value, entry in self._terms.items():
                given, counts = zip(*[part[value] for part in self._given_terms], strict=True)
                self._whole[value] = whole_of(entry.verdict.reduces, [*given], [*counts])
            env = self._inputs_of(self._late) | self._whole
            self._run(self._late, env, self._alive)
            self._whole = {v: env[v].detach() for v in env if v in self._alive}

    def _keep(self) -> None:
        before = {value for entry in self._before for value in entry.made}
        self._whole |= {value: self._data[value] for value in before & self._alive}
        self._tape.note_done(self.entries, self._whole)
        self._tape.is_split = True

    # --- on a part of the batch

    def _batch(self) -> tuple[list[Tensor], list[int | None]]:
        """Return what parts are cut from, and the dimension of each that has the samples."""
        return [value.label.apart(tensor) for value, tensor in self._data.items()], [
            value.label.sample_dim for value in self._data
        ]

    def _part(self, batch: list[Tensor]) -> tuple[dict[Value, Any], Any]:
        """Run the calls of a part; tensors by value, and those that are kept."""
        env: dict[Value, Any] = {}
        length = self._tape.n_samples
        for value, piece in zip(self._data, batch, strict=False):
            label = value.label
            if label.sample_dim is not None:
                length = piece.shape[label.sample_dim]
                piece = label.back(piece)
                # a part along a later dimension has gaps, and can't be viewed in all shapes
                if label.dim and self._data[value].is_contiguous():
                    piece = piece.contiguous()
            # no leaf itself, as what it stands for is none: autocast keeps what it casts of leaves
            env[value] = piece if value.origin is None else piece.view_as(piece)
        self._run(self._chunk, env, self._stays, length)
        values = {value: env[value].detach() for value in self._kept}
        terms = {
            v: (env[v].detach(), count_of(entry, entry.verdict.reduces, env.__getitem__, length))
            for v, entry in self._terms.items()
        }
        return env, (values, terms)

    # --- values

    def values(self) -> None:
        """Run it without gradients, for the values that somebody has."""
        self._prepare()
        tape = self._tape
        piece = RangePart(self._piece, 0, tuple(tape.generators.values()), {})
        with self._explained():
            run_pieces(
                "lazy", piece, tape.n_samples, initial=max(1, -(-tape.n_samples // 2)),
                options=Options(restore_rng=True), remembered=remembered(tape, "values"),
            )  # fmt: skip
            self._finish()
        self._keep()

    def _piece(self, start: int, end: int, *_: Any) -> None:
        """Run a part of the batch for its values."""
        parts = [
            tensor if dim is None else tensor.narrow(dim, start, end - start)
            for tensor, dim in zip(*self._batch(), strict=True)
        ]
        with torch.no_grad():
            values, _ = self._part(parts)[1]
            # all pieces beside what is made of them would take the memory twice
            with persist():
                for value, part in values.items():
                    whole, n_samples = self._whole.get(value), self._tape.n_samples
                    self._whole[value] = value.label.filled(whole, part, start, n_samples)

    # --- gradients

    def gradients(self) -> Gradients:
        """Run a loss backward in micro-batches."""
        tape = self._tape
        with torch.enable_grad():
            self._prepare()
            with self._explained(), collecting(tape) as isolated:
                result = self._step(_place_of(tape))
                found = isolated.new()
        # there is more memory than there was
        if result.micro_batch == tape.n_samples:
            remembered(tape, "whole").new().ran(tape.n_samples)
        self._keep()
        return found

    def _step(self, place: str) -> StepResult:
        """Run it by `step`, whose sizes are remembered for a place."""
        tensors, dims = self._batch()
        # what a step is given is put back when an attempt fails
        generators = list(self._tape.generators.values())
        how: dict[str, Any] = {"loss": "sum"}
        if self._taken:
            how = {
                "loss": self._function("_loss_of", place),
                "out_dims": [value.label.sample_dim for value in self._taken],
            }
        recorded = self._function("_loss", place)
        recorded.__name__ = recorded.__qualname__ = "lazy"
        spec = StepSpec(
            entry="lazy", fn=recorded, batch=[*tensors, *generators],
            in_dims=[*dims, *(None for _ in generators)], has_aux=True,
            model=_Used([*self._chunk, *self._tail]), **how,
        )  # fmt: skip
        result = run_step(spec, StepOptions(context=("lazy", place)), sys._getframe())
        values, self._given_terms = map(list, zip(*result.aux, strict=True))
        with torch.no_grad(), persist():
            for value in self._kept:
                self._whole[value] = value.label.joined([part.pop(value) for part in values])
        self._finish()
        if self._taken and self._root in self._whole:
            # with the random numbers that its gradients are of
            with persist():
                self._whole[self._root] = result.loss.clone().reshape(self._root.meta.shape)
        return result

    def _function(self, name: str, place: str) -> Any:
        """Return a method as a function that stands for the program, not for this run of it."""
        # a step tells places apart by what functions hold: an object that is new each time would
        # be another place each time, and be verified
        hidden = [self]

        def call(*args: Any) -> Any:
            assert place
            return getattr(hidden[0], name)(*args)

        return call

    def _loss(self, batch: list[Tensor]) -> Any:
        """Return the loss of a part, or the inputs of its tail; and its values."""
        env, (values, terms) = self._part(batch)
        if self._taken:
            return [value.label.apart(env[value]) for value in self._taken], (values, terms)
        loss = torch.zeros_like(next(iter(terms.values()))[0])
        for value, (_, count) in terms.items():
            # the mean of nothing is nan, which no factor undoes
            if number := float(count):
                slope, total = self._factors[value]
                factor = slope if total is None else slope * (number / total)
                loss = loss + widened(env[value]) * factor
        return loss, (values, terms)

    def _factors_of_terms(self) -> dict[Value, tuple[float, float | None]]:
        """Return the slope of the loss in each term, and what a mean divides by.

        None are known if slopes differ with the values of the terms, or a mean divides by zero.
        """
        metas = [value.meta for value in self._terms]
        factors: dict[Value, tuple[float, float | None]] = {}
        try:
            given = [torch.ones((), dtype=m.dtype, device=m.device).requires_grad_() for m in metas]
            loss = self._run_tail({v: t * 1 for v, t in zip(self._terms, given, strict=True)})
            slopes = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
            for (value, entry), slope in zip(self._terms.items(), slopes, strict=True):
                kind = entry.verdict.reduces
                total = count_of(entry, kind, self._data.__getitem__, self._tape.n_samples)
                # a product of terms has slopes with a graph
                if not total or (slope is not None and slope.requires_grad):
                    return {}
                factor = 0.0 if slope is None else float(slope)
                factors[value] = factor, None if kind == "sum" else float(total)
        except Exception as error:
            # a step runs out of memory then, and says so
            if oom_info(error) is None:
                raise
            return {}
        return factors

    def _run_tail(self, given: dict[Value, Any]) -> Tensor:
        """Run the calls from what is given to the loss."""
        root: Any = self._root
        env = self._inputs_of(self._tail) | given
        self._run(self._tail, env, [*given, *self._alive, root])
        if self._taken:
            with persist():
                self._whole = {v: env[v].detach() for v in env if v in self._alive or v in given}
        loss: Tensor = env[root]
        return loss if loss.dim() == 0 else loss.reshape(())

    def _loss_of(self, outputs: list[Any]) -> Tensor:
        taken = zip(self._taken, outputs, strict=True)
        return self._run_tail({value: value.label.back(each) for value, each in taken})

    # --- errors

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what in a program is the reason that its parts do not fit, or are not the whole."""
        try:
            yield
        except SplitMismatchError as error:
            raise self._mismatch(error) from error
        except OutOfRetriesError as error:
            call = _mixing([*self._before, *self._tail]) if self._taken else None
            if call is not None:
                raise mixing_error(self._tape, call, call.verdict.why) from error
            if self._root is None:
                raise self._too_large(error.info) from error
            if not self._kept:
                raise
            raise OutOfRetriesError(
                f"{error} Results that have a name are kept whole beside it: {self._wanted()}. "
                "`del` what you don't need of them.",
                error.sizes, error.info,
            ) from error  # fmt: skip
        except Exception as error:
            info = oom_info(error)
            if info is None:
                raise
            # what is put together of the parts
            if (call := _mixing(self._others)) is not None:
                raise mixing_error(self._tape, call, call.verdict.why) from error
            raise self._too_large(info) from error

    def _too_large(self, info: Any) -> OutOfRetriesError:
        return OutOfRetriesError(
            f"The results do not fit: {self._wanted()}, which were asked for, have a name still "
            "or are wanted whole by a call. Micro-batches make smaller what they are computed of, "
            "and not the results. Nothing was changed. Let go of what you don't need, record what "
            "makes it smaller, such as argmax() or cpu(), or pass a part of the batch at a time.",
            (self._tape.n_samples,), info,
        )  # fmt: skip

    def _mismatch(self, error: SplitMismatchError) -> SplitMismatchError:
        advice = (
            "lazy() takes one of the calls for what it is not: use step() for this program, or "
            "compute value() of what it is made of first."
        )
        return SplitMismatchError(
            f"What was recorded of {self._tape.n_samples} samples does not fit, and would give "
            f"other results in micro-batches, as a few samples show: {error.whole:.6g} in one "
            f"piece and {error.split:.6g} in parts. Nothing was changed. {advice}",
            error.whole, error.split, advice,
        )  # fmt: skip

    def _wanted(self) -> str:
        """Return what the values that somebody wants are, put together."""
        self._whole.clear()
        self._given_terms.clear()
        made = {v for entry in (*self._chunk, *self._others) for v in entry.made}
        metas = [value.meta for value in made & {*self._kept, *self._alive}]
        sizes = {meta: math.prod(meta.shape) * meta.dtype.itemsize for meta in metas}
        first = sorted(metas, key=lambda meta: -sizes[meta])
        shapes = [f"{str(meta.dtype)[6:]}{list(meta.shape)}" for meta in first]
        total = sum(sizes[meta] for meta in metas)
        return f"{listed(shapes, most=3)} ({format_bytes(total)})"


class _Used(nn.Module):
    """The tensors that recorded calls use and that were not recorded, in a module for a step.

    Those that they write into are its buffers, which a step brings back. The modules that called
    torch don't run again, so that none of them is seen.

    Args:
        entries: the calls.
    """

    def __init__(self, entries: list[RecordedCall]) -> None:
        super().__init__()
        for i, tensor in enumerate(written_by(entries)):
            self.register_buffer(f"buffer_{i}", tensor)
        plains = {id(tensor): tensor for entry in entries for tensor in entry.tensors}
        own: Any = self._parameters
        own |= {str(i): t for i, t in enumerate(plains.values()) if t.requires_grad}


def _mixing(entries: Iterable[RecordedCall]) -> RecordedCall | None:
    """Return the first of some calls that wants all samples, if one does."""
    kinds = "tail", "before"
    return next((e for e in entries if e.verdict.kind in kinds and e.verdict.why), None)


def _stages(entries: list[RecordedCall]) -> dict[RecordedCall, int]:
    """Say when each call runs."""
    alone = {entry for entry in entries if entry.is_data}
    # counted before anything runs, so that one pass is enough
    counted = {v for e in entries if e.verdict.kind == "term" for v in reads_of_count(e)}
    first = {e for e in alone if e.verdict.kind != "chunk" or counted.intersection(e.made)}
    # what is written in place is written by one stage
    rewritten = {root for entry in alone for root in entry.written()}
    more = first
    while more:
        wanted = {value for entry in first for value in entry.reads}
        shared = rewritten & {root for entry in first for root in entry.touched()}
        more = {e for e in alone - first if wanted & {*e.made} or shared & e.touched()}
        first |= more
    return {
        e: _BEFORE if e in first else _PARTS if e.verdict.kind == "chunk" else _WHOLE
        for e in entries
    }


def _refuse_writes(tape: Tape, entries: list[RecordedCall], stages: dict[Any, int]) -> None:
    """Make sure that the order of the stages changes nothing that is written in place.

    Each stage has memory of its own: a write reaches nobody who has taken a part, or the whole, at
    another stage before; and nobody takes what a later stage is to write.
    """
    touched: dict[Value, set[int]] = {}
    last_write: dict[Value, int] = {}
    for entry in entries:
        stage, written = stages[entry], entry.written()
        for root in entry.touched():
            before = touched.setdefault(root, set())
            if (root in written and before - {stage}) or last_write.get(root, stage) > stage:
                raise not_splittable(
                    tape,
                    f"{entry} uses a tensor that is written in place, and of which "
                    "parts and the whole are used: clone() it first",
                )
            before.add(stage)
            if root in written:
                last_write[root] = stage


def _taken(entries: list[RecordedCall], made: set[Value], root: Value | None) -> list[Value]:
    """Return what some calls, and the root, take of what was made before them."""
    reads = [value for entry in entries for value in entry.reads]
    return list(dict.fromkeys(v for v in (*reads, root) if v is not None and v in made))


_LINEAR = frozenset(
    names(
        """
        add sub rsub neg mul div true_divide __add__ __radd__ __sub__ __rsub__ __neg__
        __mul__ __rmul__ __truediv__ float double half bfloat16 to clone reshape view
        squeeze sum mean contiguous __iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_
        div_ type_as flatten
        """
    )
)


def _is_linear(tail: list[RecordedCall], terms: Iterable[Value]) -> bool:
    """Tell whether each of the last calls only adds terms up, or multiplies one by a constant."""
    depend = set(terms)
    if not all(value.meta.dtype.is_floating_point for value in depend):
        return False
    for entry in tail:
        # what reads no term would run twice, for the slopes and for the loss
        is_linear = getattr(entry.func, "__name__", "") in _LINEAR and depend & set(entry.reads)
        # what has no gradient may have any value, and slopes tell nothing of it
        has_graph = entry.modes.grad and all(value.meta.requires_grad for value in entry.made)
        if not (is_linear and has_graph):
            return False
        depend.update(entry.made)
    return True


def _in_order(entries: Iterable[RecordedCall]) -> list[RecordedCall]:
    """Return calls as they were recorded."""
    return sorted(entries, key=lambda entry: entry.number)
