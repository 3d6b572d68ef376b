"""The recorded program in micro-batches: by `step` for its gradients, in pieces for its values.

Invariant: a part gets its own samples of what has samples, and all of what they share; what wants
all samples runs once, on what the parts gave; the user's own tensors are not written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tenure._oom import oom_info
from tenure._text import format_bytes, listed
from tenure._torch.fakes import is_fake
from tenure.scopes import persist

from .._step import StepOptions, StepResult, StepSpec, run_step
from ._plan import SplitPlan, is_linear
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


class RecordedProgram:
    """What was recorded, as it runs on parts.

    Args:
        tape: what was recorded.
        entries: the calls that are wanted.
        plan: how to split them.

    Attributes:
        plan: how it is split.
    """

    def __init__(self, tape: Tape, entries: list[RecordedCall], plan: SplitPlan) -> None:
        check_unwritten(entries)
        self.plan = plan
        self._tape, self._entries = tape, entries
        # what parts are made of: tensors of the user's, and what is made of the batch alone
        self._data: dict[Value, Any] = {v: v.tensor for v in inputs_of(entries)}
        before = [value for entry in plan.before for value in entry.made]
        with torch.no_grad(), persist():
            run(plan.before, self._data, [*self._data, *before], tape.kind, graphs=False)
        self._alive = set(tape.alive())
        late = plan.others if plan.taken else [*plan.tail, *plan.others]
        # statistics are written whether or not anybody has what comes of it
        self._late = makers_of(late, self._alive, statistics=True)
        made = [v for entry in plan.chunk for v in entry.made if v not in plan.terms]
        wanted = self._alive | {value for entry in self._late for value in entry.reads}
        self._kept = [value for value in made if value in wanted and value not in plan.taken]
        counted = [value for entry in plan.terms.values() for value in reads_of_count(entry)]
        self._stays = [*self._kept, *plan.taken, *plan.terms, *counted]
        # of all parts, put together as they come, and what the last calls give
        self._whole: dict[Value, Any] = {}
        self._terms: list[Any] = []
        # counts that are made of what parts write, or of what is trained, are known at the end
        is_known = all(value in self._data for value in counted)
        is_one_pass = plan.terms and is_known and not self._tail_trains()
        self._factors: dict[Value, tuple[float, float | None]] | None = None
        try:
            self._factors = self._factors_of_terms() if is_one_pass else None
        except Exception as error:
            # a step runs out of memory then, and says so
            if oom_info(error) is None:
                raise

    @property
    def keeps(self) -> bool:
        """Whether results of parts are put together for somebody."""
        return bool(self._kept)

    # --- on all of the batch

    def _given(self, value: Value) -> Any:
        """Return a tensor that parts are made of, as calls get it."""
        return value.cut() if value.tensor is not None else self._data[value]

    def _run(
        self, entries: list[RecordedCall], env: dict[Value, Any], kept: Iterable[Value],
        length: int | None = None,
    ) -> None:  # fmt: skip
        # step() says whether graphs are wanted: a verification and the first of two passes are
        # without, and have memory for none
        run(entries, env, kept, self._tape.kind, length, graphs=torch.is_grad_enabled())

    def finish(self) -> None:
        """Run the calls that want all of what parts gave."""
        with torch.no_grad(), persist():
            for value, entry in self.plan.terms.items():
                given, counts = zip(*[part[value] for part in self._terms], strict=True)
                self._whole[value] = whole_of(entry.verdict.reduces, [*given], [*counts])
            env = {value: self._given(value) for value in inputs_of(self._late)
                   if value in self._data} | self._whole  # fmt: skip
            self._run(self._late, env, self._alive)
            self._whole = {v: env[v].detach() for v in env if v in self._alive}

    def keep(self) -> None:
        """Give values to who has them."""
        before = {value for entry in self.plan.before for value in entry.made}
        self._whole |= {value: self._data[value] for value in before & self._alive}
        self._tape.note_done(self._entries, self._whole)
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
        self._run(self.plan.chunk, env, self._stays, length)
        values = {value: env[value].detach() for value in self._kept}
        terms = {
            v: (env[v].detach(), count_of(entry, entry.verdict.reduces, env.__getitem__, length))
            for v, entry in self.plan.terms.items()
        }
        return env, (values, terms)

    # --- values

    def piece(self, start: int, end: int, *_: Any) -> None:
        """Run a part of the batch for its values."""
        parts = [
            tensor if dim is None else tensor.narrow(dim, start, end - start)
            for tensor, dim in zip(*self._batch(), strict=True)
        ]
        with torch.no_grad():
            values, terms = self._part(parts)[1]
            # all pieces beside what is made of them would take the memory twice
            with persist():
                for value, part in values.items():
                    whole, n_samples = self._whole.get(value), self._tape.n_samples
                    self._whole[value] = value.label.filled(whole, part, start, n_samples)
        self._terms.append(terms)

    def wanted(self) -> str:
        """Return what the values that somebody wants are, put together."""
        self._whole.clear()
        self._terms.clear()
        made = {v for entry in (*self.plan.chunk, *self.plan.others) for v in entry.made}
        metas = [value.meta for value in made & {*self._kept, *self._alive}]
        sizes = {meta: math.prod(meta.shape) * meta.dtype.itemsize for meta in metas}
        first = sorted(metas, key=lambda meta: -sizes[meta])
        shapes = [f"{str(meta.dtype)[6:]}{list(meta.shape)}" for meta in first]
        total = sum(sizes[meta] for meta in metas)
        return f"{listed(shapes, most=3)} ({format_bytes(total)})"

    # --- gradients

    def step(self, place: str) -> StepResult:
        """Run it backward in micro-batches, whose sizes are remembered for a place."""
        tensors, dims = self._batch()
        # what a step is given is put back when an attempt fails
        generators = list(self._tape.generators.values())
        plan = self.plan
        how: dict[str, Any] = {"loss": "sum"}
        if plan.taken:
            how = {
                "loss": self._function("_loss_of", place),
                "out_dims": [value.label.sample_dim for value in plan.taken],
            }
        elif self._factors is None:
            how = {"then": self._function("_then", place)}
        recorded = self._function("_loss", place)
        recorded.__name__ = recorded.__qualname__ = "lazy"
        spec = StepSpec(
            entry="lazy", fn=recorded, batch=[*tensors, *generators],
            in_dims=[*dims, *(None for _ in generators)], has_aux=True,
            model=_Used([*plan.chunk, *plan.tail]), **how,
        )  # fmt: skip
        result = run_step(spec, StepOptions(context=("lazy", place)), sys._getframe())
        values, self._terms = map(list, zip(*result.aux, strict=True))
        with torch.no_grad(), persist():
            for value in self._kept:
                self._whole[value] = value.label.joined([part.pop(value) for part in values])
        self.finish()
        if self._factors is None and plan.root in self._whole:
            # with the random numbers that its gradients are of
            with persist():
                self._whole[plan.root] = result.loss.clone()
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
        """Return the loss of a part, its terms, or the inputs of its tail; and its values."""
        env, (values, terms) = self._part(batch)
        if self.plan.taken:
            loss: Any = [value.label.apart(env[value]) for value in self.plan.taken]
        elif self._factors is None:
            loss = {str(i): self._pair(v, env[v], terms[v][1]) for i, v in enumerate(terms)}
            # a second term takes two passes: in one, gradients in half precision would get what
            # then() multiplies by, such as the scale of a GradScaler, when they are zero already
            loss["none"] = torch.zeros_like(next(iter(terms.values()))[0])
        else:
            loss = torch.zeros_like(next(iter(terms.values()))[0])
            for value, (_, count) in terms.items():
                number = count if is_fake(count) else float(count)
                # the mean of nothing is nan, which no factor undoes
                if is_fake(count) or number:
                    slope, total = self._factors[value]
                    factor = slope if total is None else slope * (number / total)
                    loss = loss + widened(env[value]) * factor
        return loss, (values, terms)

    def _pair(self, term: Value, value: Tensor, count: Any) -> Any:
        kind = self.plan.terms[term].verdict.reduces
        # classes with probabilities have a mean over samples, and no tensor as their count
        if kind == "counted" and isinstance(count, Tensor):
            # the mean of nothing is nan, and its part of the sum is zero
            return torch.where(count > 0, value * count, 0 * count), count
        # as a mean over samples it adds up to the sum over all
        return value * (self._tape.n_samples / count) if kind == "sum" else value

    def _factors_of_terms(self) -> dict[Value, tuple[float, float | None]] | None:
        """Return the slope of the loss in each term, and what a mean divides by.

        None if these differ with the values of the terms, or a mean divides by zero.
        """
        terms = self.plan.terms
        if not is_linear(self.plan.tail, terms):
            return None
        slopes = self._slopes(1.0)
        if slopes != self._slopes(2.5):
            return None
        factors: dict[Value, tuple[float, float | None]] = {}
        for (value, entry), slope in zip(terms.items(), slopes, strict=True):
            kind = entry.verdict.reduces
            total = count_of(entry, kind, self._data.__getitem__, self._tape.n_samples)
            if not total:
                return None
            factors[value] = slope, None if kind == "sum" else float(total)
        return factors

    def _slopes(self, size: float) -> list[float]:
        """Return the slopes of the loss where the terms are so large, each a little larger."""
        metas = [entry.shape.metas[0] for entry in self.plan.terms.values()]
        with torch.enable_grad():
            given = [
                torch.full(
                    (), size + 0.5 * i, dtype=meta.dtype, device=meta.device
                ).requires_grad_()
                for i, meta in enumerate(metas)
            ]
            loss = self._tail({v: each * 1 for v, each in zip(self.plan.terms, given, strict=True)})
            slopes = torch.autograd.grad(loss, given, allow_unused=True)
        return [0.0 if slope is None else float(slope) for slope in slopes]

    def _tail_trains(self) -> bool:
        """Tell whether the tail has parameters of its own."""
        inputs = [v.tensor for v in inputs_of(self.plan.tail) if v in self._data]
        plains = [tensor for entry in self.plan.tail for tensor in entry.tensors]
        return any(t is not None and t.requires_grad for t in (*plains, *inputs))

    def _tail(self, given: dict[Value, Any]) -> Tensor:
        """Run the calls from what is given to the loss."""
        tail, root = self.plan.tail, self.plan.root
        assert root is not None
        env = {v: self._given(v) for v in inputs_of(tail) if v in self._data} | given
        self._run(tail, env, [*given, *self._alive, root])
        if self.plan.taken:
            with persist():
                self._whole = {v: env[v].detach() for v in env if v in self._alive or v in given}
        loss: Tensor = env[root]
        return loss if loss.dim() == 0 else loss.reshape(())

    def _then(self, totals: dict[str, Tensor]) -> Tensor:
        return self._tail({v: totals[str(i)] * 1 for i, v in enumerate(self.plan.terms)})

    def _loss_of(self, outputs: list[Any]) -> Tensor:
        taken = zip(self.plan.taken, outputs, strict=True)
        return self._tail({value: value.label.back(each) for value, each in taken})


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
