"""Computing what was recorded: on all samples at once, and where that does not fit, in parts.

In parts it runs in three stages, each of which reads what those before it gave. First, what is made
of the batch alone and mixes samples, on all of it. Then, on each part of the batch, the calls that
keep samples apart, and the terms of the loss. Last, once, what reads the results of all parts.

Invariant: a part gets its own samples of what has samples, and all of what they share; random
numbers are drawn, and buffers written, as often as in the program that was recorded; where it
fails, all is as if nothing had run.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from tenure._errors import (
    BatchCoupledError,
    OutOfRetriesError,
    SplitMismatchError,
    TenureError,
)
from tenure._oom import OomInfo, oom_info, oom_of_work
from tenure._text import format_bytes, listed
from tenure.scopes import persist

from .._attempt import release
from .._decorators import Options, RangePart, run_pieces
from .._ranks import has_other_ranks
from .._sizes import RememberedCall
from .._step import IsolatedGradients, StepOptions, StepResult, StepSpec, leaves_of, run_step
from .._undo import RngState
from ._tape import (
    Handle,
    RecordedCall,
    Tape,
    Value,
    check_unwritten,
    inputs_of,
    makers_of,
    of_data,
    run,
    written_by,
)
from ._trial import count_of, judge, reads_of_count, whole_of, widened

_curved: set[str] = set()
"""The programs whose loss is no sum of its terms times numbers."""
Gradients = list[tuple[Tensor, Tensor]]
"""Leaves, and what a backward pass gives each."""
_MIXING = (
    "Pass a smaller batch; freeze a normalization with eval(), or accept "
    'statistics of each micro-batch with step(..., batchnorm="per_chunk"); compute a loss that '
    "compares samples of smaller outputs, or with step(..., loss=...)."
)


def value_of(lazy: Handle) -> Tensor:
    """Return the tensor that a recorded one stands for, computed if it was not."""
    tape, value = lazy._tape, lazy._value
    tape.check_current(value)
    if value.tensor is None:
        with failing(tape, value):
            _compute(tape, value)
    found: Tensor = value.cut()
    return found


@contextmanager
def failing(tape: Tape, value: Value) -> Iterator[None]:
    """Note that the computation of a value fails in a block, if it does."""
    try:
        yield
    except BaseException:
        tape.failed.add(value)
        raise
    tape.failed.discard(value)


def _compute(tape: Tape, value: Value) -> None:
    pending = tape.pending(value)
    # what is made of the batch alone does not need what else waits
    alone = makers_of(pending, [value])
    if of_data(tape.entries).issuperset(alone) and not tape.is_split:
        check_unwritten(alone)
        if _unless_too_large(tape, lambda: run_whole(tape, alone)) is None:
            return
    # a loss is read with its gradients, which wait
    is_number = value.meta.dtype.is_floating_point and math.prod(value.meta.shape) == 1
    is_loss = value.meta.requires_grad and is_number and bool(_leaves_in(tape))
    found: Any = whole_or_parts(
        tape, value, lambda: run_whole(tape, tape.pending(value)), is_loss=is_loss
    )
    if found is not None:
        tape.held = value, found
    if not any(entry.trains for entry in tape.entries):
        # nothing will run them again
        tape.consume()


def whole_or_parts(tape: Tape, value: Value, whole: Callable[[], Any], *, is_loss: bool) -> Any:
    """Compute a value, of the whole where it fits.

    Args:
        tape: what was recorded.
        value: what is wanted of it.
        whole: runs it whole.
        is_loss: whether parts give its gradients, too.

    Returns:
        The result of ``whole``, or the gradients of the parts; None for a value without them.
    """
    check_unwritten(tape.pending(value))
    program: SplitProgram | None = None
    if _is_known_not_to_fit(tape):
        with suppress(BatchCoupledError, OutOfRetriesError):
            program = SplitProgram(tape, value, is_loss=is_loss)
    if program is None:
        found: Any = _unless_too_large(tape, whole)
        if not isinstance(found, OomInfo):
            return found
        program = SplitProgram(tape, value, is_loss=is_loss)
        _remembered(tape, "whole").new().ran_out(tape.n_samples, 1, found.device)
    if any(entry.is_done for entry in tape.entries):
        tape.start_over()
    tape.begin(program.entries)
    try:
        if is_loss:
            return program.gradients()
        program.values()
        return None
    except BaseException:
        tape.start_over()
        raise


def _is_known_not_to_fit(tape: Tape) -> bool:
    record = _remembered(tape, "whole").known()
    return record is not None and record.bad is not None and tape.n_samples >= record.bad


def _unless_too_large(tape: Tape, work: Callable[[], Any]) -> Any:
    """Return what work gives; or what ran out of memory, with all as before."""
    outside = sys.exception()
    try:
        return work()
    except BaseException as error:
        info = oom_of_work(error, outside)
        if info is None or not info.retry_safe:
            tape.start_over()
            raise
        failure = error
    release(failure, outside)
    del failure
    tape.start_over()
    return info


def run_whole(tape: Tape, pending: list[RecordedCall]) -> None:
    """Run calls on all samples."""
    tape.begin(pending)
    env: dict[Value, Any] = {}
    # the others wait on
    waiting = {entry for entry in tape.entries if not entry.is_done}.difference(pending)
    kept = [*tape.alive(), *(value for entry in waiting for value in entry.reads)]
    with persist():
        run(pending, env, kept)
    tape.note_done(pending, env)


def _remembered(tape: Tape, what: str) -> RememberedCall:
    """Return where it is remembered which sizes of a program fit, whole or of its values."""
    # it holds this frame: a local of who uses it would be a cycle, with all that is recorded
    return RememberedCall(None, sys._getframe(), (f"lazy {what}", _place_of(tape)), None, (), {})


def _place_of(tape: Tape) -> str:
    """Return what stands for the program, whatever the number of samples."""
    calls = " ".join(entry.name for entry in tape.entries)
    return hashlib.blake2s(calls.encode(), digest_size=8).hexdigest()


def _leaves_in(tape: Tape) -> list[Tensor]:
    """Return the tensors that may get gradients."""
    plains = (tensor for entry in tape.entries for tensor in entry.tensors)
    values = (value.tensor for value in inputs_of(tape.entries))
    found = (*plains, *(tensor for tensor in values if tensor is not None))
    return leaves_of(tensor for tensor in found if tensor.requires_grad)


def origins_in(tape: Tape) -> list[tuple[Value, Tensor]]:
    """Return the values of tensors that came with a graph, and these tensors."""
    return [(v, v.origin) for v in inputs_of(tape.entries) if v.origin is not None]


@contextmanager
def collecting(tape: Tape) -> Iterator[IsolatedGradients]:
    """Open a block that makes gradients, which nobody sees."""
    isolated = IsolatedGradients(_leaves_in(tape))
    isolated.begin()
    # leaves of a graph that a tensor came with get their gradients in two passes
    isolated.hold_hooks(leaves_of(origin for _, origin in origins_in(tape)))
    try:
        yield isolated
    finally:
        isolated.undo()


class SplitProgram:
    """The recorded program, as it runs on parts.

    Args:
        tape: what was recorded.
        value: what is wanted of it.
        is_loss: whether its gradients are wanted.

    Attributes:
        entries: the calls that are wanted.

    Raises:
        BatchCoupledError: it mixes samples.
        OutOfRetriesError: it can't be split for another reason.
    """

    def __init__(self, tape: Tape, value: Value, *, is_loss: bool) -> None:
        self._tape, self._n, self._place = tape, tape.n_samples, _place_of(tape)
        self.entries = tape.wanted(value)
        self._root = value if is_loss else None
        # when each call runs: before the parts, in each, or at last
        self._before: list[RecordedCall] = []
        self._parts: list[RecordedCall] = []
        self._last: list[RecordedCall] = []
        coupled = "other processes take part in it, and would wait for one that splits differently"
        if has_other_ranks() or tape.coupled is not None:
            raise self._refused(tape.coupled or coupled)
        self._judge()
        self._choose_terms(has_terms=self._place not in _curved)
        self._whole: dict[Value, Any] = {}
        if not (self._taken or self._terms or (self._parts and not is_loss)):
            raise self._refused("nothing in it runs on one sample at a time", self._mixing())

    def _judge(self) -> None:
        tape, entries = self._tape, self.entries
        data, late = of_data(entries), set[Value]()
        rng = RngState({v.meta.device for v in inputs_of(entries)}, tape.generators.values())
        rng.begin()
        for entry in entries:
            entry.verdict = None
            if late.isdisjoint(entry.reads):
                try:
                    judge(entry, self._n, rng)
                except Exception as error:
                    if oom_info(error) is None:
                        raise
                    raise self._refused(
                        "two samples of it, tried without gradients, do not fit either",
                        self._mixing(),
                    ) from error
            if entry not in data and not _is("apart", entry):
                self._last.append(entry)
                late.update(entry.made)
        # counts are known before anything runs, so that one pass is enough
        wanted = {v for entry in self._last for v in reads_of_count(entry)}
        for entry in reversed(entries):
            if entry in data and (not _is("apart", entry) or wanted.intersection(entry.made)):
                self._before.insert(0, entry)
                wanted.update(entry.reads)
        others = {*self._before, *self._last}
        self._parts = [entry for entry in entries if entry not in others]

    def _choose_terms(self, *, has_terms: bool) -> None:
        """Find what the parts give for the loss, and what runs on that."""
        root, alive = self._root, self._tape.alive()
        made = {value for entry in self._parts for value in entry.made}
        data = {*inputs_of(self.entries), *(v for entry in self._before for v in entry.made)}
        with_gradients = made | {value for value in data if value.meta.requires_grad}
        tail = [] if root is None else makers_of(self._last, [root])
        terms = {
            entry.made[0]: entry for entry in tail
            if entry.made[0].meta.dtype.is_floating_point and _is("term", entry)
        }  # fmt: skip
        after = [entry for entry in tail if entry not in terms.values()]
        counted = {value for entry in terms.values() for value in reads_of_count(entry)}
        reads = {value for entry in after for value in entry.reads}
        # a slope of the loss in a term is a number, and what it is of is known at once
        is_late = any(tensor.requires_grad for entry in after for tensor in entry.tensors)
        if is_late or reads & with_gradients or counted - data or not has_terms:
            terms = {}
        self._terms, self._after = terms, after
        rest = [entry for entry in self._last if entry not in terms.values()]
        asked = alive if root is None else [root, *alive]
        # statistics are written whether or not anybody has what comes of it
        self._late = makers_of(rest, asked, statistics=True)
        wanted = dict.fromkeys([v for entry in self._late for v in entry.reads])
        # what the last calls take of all parts, if the loss is more than a sum of terms
        self._taken = []
        if root is not None and not terms:
            self._taken = [v for v in (wanted | {root: None}) if v in with_gradients]
        of_parts = made.difference(self._taken)
        self._kept = [v for v in dict.fromkeys([*wanted, *alive]) if v in of_parts]

    def _prepare(self) -> None:
        """Run what is made of the batch alone and mixes samples."""
        check_unwritten(self.entries)
        # what parts are made of: tensors of the user's, and what is made of the batch alone
        self._data: dict[Value, Any] = {v: v.tensor for v in inputs_of(self.entries)}
        made = [value for entry in self._before for value in entry.made]
        with torch.no_grad(), persist():
            run(self._before, self._data, [*self._data, *made], graphs=False)
        self._whole = {value: self._data[value] for value in made}

    def _run_late(self, given: dict[Value, Any], entries: list[RecordedCall]) -> dict[Value, Any]:
        """Run some of the last calls; the values that are kept."""
        env = {v: self._data[v] if v.tensor is None else v.cut() for v in self._data} | given
        kept = [*given, *self._tape.alive(), *(value for e in entries for value in e.made[:1])]
        # step() says whether graphs are wanted: a verification and the first of two passes are
        # without, and have memory for none
        run(entries, env, kept, graphs=torch.is_grad_enabled())
        return env

    def _keep(self) -> None:
        alive = set(self._tape.alive())
        found = {v: tensor.detach() for v, tensor in self._whole.items() if v in alive}
        self._tape.note_done(self.entries, found)
        self._tape.is_split = True

    # --- on a part of the batch

    def _part(self, batch: list[Tensor]) -> tuple[dict[Value, Any], Any]:
        """Run the calls of a part; tensors by value, and those that are kept."""
        env: dict[Value, Any] = {}
        length = self._n
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
        counted = [value for entry in self._terms.values() for value in reads_of_count(entry)]
        entries = sorted([*self._parts, *self._terms.values()], key=lambda entry: entry.number)
        stay = [*self._kept, *self._taken, *self._terms, *counted]
        run(entries, env, stay, length, graphs=torch.is_grad_enabled())
        terms = {
            v: (env[v].detach(), count_of(entry, entry.verdict.reduces, env.__getitem__, length))
            for v, entry in self._terms.items()
        }
        return env, ({value: env[value].detach() for value in self._kept}, terms)

    # --- values

    def values(self) -> None:
        """Run it without gradients, for the values that somebody has."""
        tape, n_samples = self._tape, self._n

        def piece(start: int, end: int, *_: Any) -> None:
            parts = [
                tensor if dim is None else tensor.narrow(dim, start, end - start)
                for tensor, dim in zip(*self._batch(), strict=True)
            ]
            with torch.no_grad():
                values, _ = self._part(parts)[1]
                # all pieces beside what is made of them would take the memory twice
                with persist():
                    for value, part in values.items():
                        whole = self._whole.get(value)
                        self._whole[value] = value.label.filled(whole, part, start, n_samples)

        self._prepare()
        work = RangePart(piece, 0, tuple(tape.generators.values()), {})
        with self._explained():
            run_pieces(
                "lazy", work, n_samples, initial=max(1, -(-n_samples // 2)),
                options=Options(restore_rng=True), remembered=_remembered(tape, "values"),
            )  # fmt: skip
            with torch.no_grad(), persist():
                self._whole |= self._run_late(self._whole, self._late)
        self._keep()

    def _batch(self) -> tuple[list[Tensor], list[int | None]]:
        """Return what parts are cut from, and the dimension of each that has the samples."""
        return [value.label.apart(tensor) for value, tensor in self._data.items()], [
            value.label.sample_dim for value in self._data
        ]

    # --- gradients

    def gradients(self) -> Gradients:
        """Run a loss backward in micro-batches."""
        found = self._gradients()
        if found is None:
            # no sum of terms times numbers: it runs on the results of all parts
            self._tape.start_over()
            self._tape.begin(self.entries)
            self._choose_terms(has_terms=False)
            found = self._gradients()
        assert found is not None
        return found

    def _gradients(self) -> Gradients | None:
        tape = self._tape
        with torch.enable_grad():
            self._prepare()
            self._totals, ones, get = dict[Value, float](), {}, self._data.__getitem__
            try:
                for v, entry in self._terms.items():
                    self._totals[v] = float(count_of(entry, entry.verdict.reduces, get, self._n))
                    ones[v] = torch.ones((), dtype=v.meta.dtype, device=v.meta.device)
                self._slopes = self._slopes_at(ones)
            except Exception as error:
                # a step runs out of memory then, and says so
                if oom_info(error) is None:
                    raise
                return None
            if not all(self._totals.values()):
                return None
            with self._explained(), collecting(tape) as isolated:
                result = self._step()
                if self._slopes_at({v: self._whole[v] for v in self._terms}) != self._slopes:
                    _curved.add(self._place)
                    return None
                found = isolated.new()
                if not self._taken:
                    with torch.no_grad(), persist():
                        self._whole |= self._run_late(self._whole, self._late)
        # there is more memory than there was
        if result.micro_batch == self._n:
            _remembered(tape, "whole").new().ran(self._n)
        self._keep()
        return found

    def _slopes_at(self, terms: dict[Value, Tensor]) -> dict[Value, float]:
        """Return the slope of the loss in each of its terms, at some values of them."""
        leaves = {value: term.detach().requires_grad_() for value, term in terms.items()}
        if not leaves:
            return {}
        env = self._run_late({v: leaf * 1 for v, leaf in leaves.items()}, self._after)
        root: Any = self._root
        slopes = torch.autograd.grad(env[root], [*leaves.values()], allow_unused=True)
        return {
            value: 0.0 if slope is None else float(slope)
            for value, slope in zip(leaves, slopes, strict=True)
        }

    def _step(self) -> StepResult:
        """Run it by `step`."""
        tensors, dims = self._batch()
        # what a step is given is put back when an attempt fails
        generators = list(self._tape.generators.values())
        how: dict[str, Any] = {"loss": "sum"}
        if self._taken:
            how = {
                "loss": self._function("_loss_of"),
                "out_dims": [value.label.sample_dim for value in self._taken],
            }
        recorded = self._function("_loss")
        recorded.__name__ = recorded.__qualname__ = "lazy"
        spec = StepSpec(
            entry="lazy", fn=recorded, batch=[*tensors, *generators],
            in_dims=[*dims, *(None for _ in generators)], has_aux=True,
            model=_Used([*self._parts, *self._terms.values(), *self._late]), **how,
        )  # fmt: skip
        result = run_step(spec, StepOptions(context=("lazy", self._place)), sys._getframe())
        values, seen = map(list, zip(*result.aux, strict=True))
        with torch.no_grad(), persist():
            for value in self._kept:
                self._whole[value] = value.label.joined([part.pop(value) for part in values])
            for value, entry in self._terms.items():
                terms, counts = zip(*[part[value] for part in seen], strict=True)
                self._whole[value] = whole_of(entry.verdict.reduces, [*terms], [*counts])
        return result

    def _function(self, name: str) -> Any:
        """Return a method as a function that stands for the program, not for this run of it."""
        # a step tells places apart by what functions hold: an object that is new each time would
        # be another place each time, and be verified
        hidden, place = [self], self._place

        def call(*args: Any) -> Any:
            assert place
            return getattr(hidden[0], name)(*args)

        return call

    def _loss(self, batch: list[Tensor]) -> Any:
        """Return the loss of a part, or what the last calls take of it; and its values."""
        env, (values, terms) = self._part(batch)
        if self._taken:
            return [value.label.apart(env[value]) for value in self._taken], (values, terms)
        loss = torch.zeros_like(next(iter(terms.values()))[0])
        for value, (_, count) in terms.items():
            # the mean of nothing is nan, which no factor undoes
            if number := float(count):
                is_sum = self._terms[value].verdict.reduces == "sum"
                share = 1.0 if is_sum else number / self._totals[value]
                loss = loss + widened(env[value]) * (self._slopes[value] * share)
        return loss, (values, terms)

    def _loss_of(self, outputs: list[Any]) -> Tensor:
        """Return the loss by the results of all parts."""
        # a call may not be differentiable with respect to what is made of labels
        given = {
            v: v.label.back(each if v.meta.requires_grad else each.detach())
            for v, each in zip(self._taken, outputs, strict=True)
        }
        env = self._run_late(given, self._late)
        with persist():
            self._whole |= {value: tensor.detach() for value, tensor in env.items()}
        root: Any = self._root
        loss: Tensor = env[root]
        return loss.reshape(())

    # --- errors

    def _refused(self, why: str, mixing: RecordedCall | None = None) -> TenureError:
        """Return the error of a program that has to run whole; a call that mixes is named."""
        if mixing is not None:
            why = (
                f"{mixing} wants all samples ({mixing.verdict.why}), and what is computed "
                "from there on does not fit"
            )
        text = (
            f"What was recorded of {self._n} samples ran out of memory, and can't be split: "
            f"{why}. Nothing was changed. "
        )
        if mixing is not None:
            return BatchCoupledError(text + _MIXING, (str(mixing),))
        return OutOfRetriesError(
            f"{text}Pass a smaller batch, or say with step() what to do.", (self._n,)
        )

    def _mixing(self) -> RecordedCall | None:
        """Return the first call that wants all samples, so that the rest is large."""
        for entry in self.entries:
            if entry.verdict is None or _is("apart", entry) or not entry.verdict.why:
                continue
            # what the batch alone is reduced to is small
            made = sum(math.prod(m.shape) for m in entry.shape.metas if not m.label.is_batch)
            read = sum(math.prod(v.meta.shape) for v in entry.reads if v.label.is_batch)
            if entry not in self._before or 2 * made >= read > 0:
                return entry
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what in a program is the reason that its parts do not fit, or are not the whole."""
        try:
            yield
        except SplitMismatchError as error:
            error.add_note(
                "lazy() takes one of the calls for what it is not: use step() for this program, or "
                "compute value() of what it is made of first."
            )
            raise
        except Exception as error:
            info = error.info if isinstance(error, OutOfRetriesError) else oom_info(error)
            is_retried = isinstance(error, OutOfRetriesError)
            if info is None and not is_retried:
                raise
            mixing = self._mixing() if self._taken or not is_retried else None
            if mixing is not None:
                raise self._refused("", mixing) from error
            if is_retried and self._root is not None and not self._kept:
                raise
            raise OutOfRetriesError(
                f"The results do not fit: {self._wanted()}, which were asked for, have a name "
                "still or are wanted whole by a call. Micro-batches make smaller what they are "
                "computed of, and not the results. Nothing was changed. `del` what you don't need, "
                "record what makes it smaller, such as argmax() or cpu(), or pass a part of the "
                "batch at a time.",
                (self._n,), info,
            ) from error  # fmt: skip

    def _wanted(self) -> str:
        """Return what the values that somebody wants are, put together."""
        self._whole.clear()
        made = {v for entry in (*self._parts, *self._last) for v in entry.made}
        metas = [value.meta for value in made.intersection([*self._kept, *self._tape.alive()])]
        sizes = {meta: math.prod(meta.shape) * meta.dtype.itemsize for meta in metas}
        first = sorted(metas, key=lambda meta: -sizes[meta])
        shapes = [f"{str(meta.dtype)[6:]}{list(meta.shape)}" for meta in first]
        total = sum(sizes[meta] for meta in metas)
        return f"{listed(shapes, most=3)} ({format_bytes(total)})"


def _is(kind: str, entry: RecordedCall) -> bool:
    return entry.verdict is not None and entry.verdict.kind == kind


class _Used(nn.Module):
    """The tensors that recorded calls use and that were not recorded, in a module for a step.

    Those that they write into are its buffers, which a step brings back. The modules that called
    torch don't run again, so that none of them is seen.
    """

    def __init__(self, entries: list[RecordedCall]) -> None:
        super().__init__()
        for i, tensor in enumerate(written_by(entries)):
            self.register_buffer(f"buffer_{i}", tensor)
        plains = {id(tensor): tensor for entry in entries for tensor in entry.tensors}
        own: Any = self._parameters
        own |= {str(i): t for i, t in enumerate(plains.values()) if t.requires_grad}
