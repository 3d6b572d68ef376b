"""The recorded program in micro-batches: by `step` for its gradients, in pieces for its values.

Invariant: a part gets its own samples of what has samples, and all of what they share; what wants
all samples runs once, on what the parts gave; the user's own tensors are not written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenure._oom import oom_info
from tenure._text import format_bytes, listed
from tenure._torch.fakes import is_fake
from tenure.scopes import persist

from .._step import StepOptions, StepResult, StepSpec, run_step
from ._meta import SHARED
from ._plan import SplitPlan, is_linear
from ._replay import ReplayPlan, replayed, run, written_by
from ._tape import PlainValue, RecordedCall, Tape, check_unwritten, leaf_of, makers_of
from ._terms import count_of, reads_of_count, whole_of, widened


class RecordedProgram:
    """What was recorded, as it runs on parts.

    Args:
        tape: what was recorded.
        plan: how to split it.
        root: the number of the loss; None: only values are wanted.

    Attributes:
        plan: how it is split.
        values: the values that somebody has, after it ran.
    """

    def __init__(self, tape: Tape, plan: SplitPlan, root: int | None) -> None:
        check_unwritten(tape.entries, tape.leaves)
        self.plan = plan
        self.values: dict[int, Tensor] = {}
        self._tape, self._root, self._labels = tape, root, tape.labels()
        self._data = self._run_before()
        late = plan.others if plan.taken else [*plan.tail, *plan.others]
        # statistics are written whether or not anybody has what comes of it
        self._late = makers_of(late, tape.handles, tape.views, statistics=True)
        made = {n for e in plan.chunk for n in e.made if n not in plan.terms} | plan.written
        wanted = tape.handles.keys() | {n for entry in self._late for n in entry.reads}
        self._kept = sorted((made & wanted).difference(plan.taken))
        counted = [n for entry in plan.terms.values() for n in reads_of_count(entry)]
        self._chunk = replayed(plan.chunk, [*self._kept, *plan.taken, *plan.terms, *counted])
        self._joined: dict[int, Any] = {}
        # of pieces: their values, put together as they come, and their terms
        self._whole: dict[int, Any] = {}
        self._terms: list[Any] = []
        # counts that are made of what parts write, or of what is trained, are known at the end
        is_known = all(n in self._data and n not in plan.written for n in counted)
        is_one_pass = plan.terms and is_known and not self._tail_trains()
        self._factors: dict[int, tuple[float, float | None]] | None = None
        try:
            self._factors = self._factors_of_terms() if is_one_pass else None
        except Exception as error:
            # a step runs out of memory then, and says so
            if oom_info(error) is None:
                raise

    # --- once, on the whole batch

    def _run_before(self) -> dict[int, PlainValue]:
        """Return what parts are made of: leaves, and what is made of the batch alone."""
        data, first = dict(self._tape.leaves), self.plan.written_first
        if not self.plan.before:
            return data
        env: dict[int, Any] = {
            n: leaf.value.clone() if n in first else leaf.value for n, leaf in data.items()
        }
        made = [*first, *(n for entry in self.plan.before for n in entry.made)]
        with torch.no_grad(), persist():
            run(replayed(self.plan.before, [*made, *env]), env, self._tape.kind, graphs=False)
        return data | {n: leaf_of(env[n], self._labels.get(n, SHARED)) for n in made}

    def _finish(self, values: dict[int, Any], terms: Sequence[Any]) -> None:
        """Run the calls that want all of what parts gave."""
        handles = self._tape.handles
        with torch.no_grad(), persist():
            env = self._joined | values
            for n, entry in self.plan.terms.items():
                given, counts = zip(*[part[n] for part in terms], strict=True)
                env[n] = whole_of(entry.verdict.reduces, [*given], [*counts])
            self._run(replayed(self._late, handles), env, graphs=False)
            self.values = {n: value.detach() for n, value in env.items() if n in handles}
        self.values |= {
            n: leaf.value for n, leaf in self._data.items()
            if n in handles and (n not in self._tape.leaves or n in self.plan.written_first)
        }  # fmt: skip

    def _run(
        self,
        what: ReplayPlan,
        env: dict[int, Any],
        length: int | None = None,
        *,
        graphs: bool | None = None,
    ) -> None:
        # step() says whether graphs are wanted: a verification and the first of two passes are
        # without, and have memory for none
        graphs = torch.is_grad_enabled() if graphs is None else graphs
        run(what, env, self._tape.kind, length, others=self._data, graphs=graphs)

    # --- on a part of the batch

    def _batch(self) -> tuple[list[Tensor], list[int | None]]:
        """Return what parts are cut from, and the dimension of each that has the samples."""
        data = self._data.values()
        return [leaf.label.apart(leaf.value) for leaf in data], [
            leaf.label.sample_dim for leaf in data
        ]

    def _part(self, batch: list[Tensor]) -> tuple[dict[int, Any], Any]:
        """Run the calls of a part; values by number, and those that are kept."""
        env: dict[int, Any] = {}
        length = self._tape.n_samples
        for (number, leaf), piece in zip(self._data.items(), batch, strict=False):
            label = leaf.label
            if label.sample_dim is not None:
                length = piece.shape[label.sample_dim]
                piece = label.back(piece)
                # a part along a later dimension has gaps, and can't be viewed in all shapes
                if label.dim and leaf.value.is_contiguous():
                    piece = piece.contiguous()
            # no leaf itself, as what it stands for is none: autocast keeps what it casts of leaves
            if leaf.origin is not None:
                piece = piece.view_as(piece)
            # the user's own tensor is not written: the recorded one is
            env[number] = piece.clone() if number in self.plan.written else piece
        self._run(self._chunk, env, length)
        values = {n: env[n].detach() for n in self._kept}
        terms = {
            n: (env[n].detach(), count_of(entry, entry.verdict.reduces, env.__getitem__, length))
            for n, entry in self.plan.terms.items()
        }
        return env, (values, terms)

    # --- values

    def piece(self, start: int, end: int, *_: Any) -> None:
        """Run a part of the batch for its values."""
        parts = [
            value if dim is None else value.narrow(dim, start, end - start)
            for value, dim in zip(*self._batch(), strict=True)
        ]
        with torch.no_grad():
            values, terms = self._part(parts)[1]
            # all pieces beside what is made of them would take the memory twice
            with persist():
                for n, value in values.items():
                    whole = self._whole.get(n)
                    n_samples = self._tape.n_samples
                    self._whole[n] = self._labels[n].filled(whole, value, start, n_samples)
        self._terms.append(terms)

    def finish(self) -> None:
        """Run what wants the values of all pieces."""
        self._finish(self._whole, self._terms)

    def wanted(self) -> str:
        """Return what the values that somebody wants are, put together."""
        self._whole.clear()
        self._terms.clear()
        entries = [*self.plan.chunk, *self.plan.others]
        metas = {n: m for e in entries for n, m in zip(e.made, e.shape.metas, strict=True)}
        names = {*self._kept, *self._tape.handles} & metas.keys()
        sizes = {n: math.prod(metas[n].shape) * metas[n].dtype.itemsize for n in names}
        first = sorted(names, key=lambda n: -sizes[n])
        shapes = [f"{str(metas[n].dtype)[6:]}{list(metas[n].shape)}" for n in first]
        return f"{listed(shapes, most=3)} ({format_bytes(sum(sizes.values()))})"

    # --- gradients

    def step(self, place: str, *, predict: bool) -> StepResult:
        """Run it backward in micro-batches.

        Args:
            place: what sizes are remembered for.
            predict: whether to begin with the size that is predicted to fit, if none is known.
        """
        tensors, dims = self._batch()
        # what a step is given is put back when an attempt fails
        generators = list(self._tape.generators.values())
        plan = self.plan
        how: dict[str, Any] = {"loss": "sum"}
        if plan.taken:
            how = {
                "loss": self._function("_loss_of", place),
                "out_dims": [self._labels[n].sample_dim for n in plan.taken],
            }
        elif self._factors is None:
            how = {"then": self._function("_then", place)}
        recorded = self._function("_loss", place)
        used = _Used([*plan.chunk, *plan.tail])
        if predict:
            recorded.__kwdefaults__ = {"_reached": (used.trained, used.constants)}
        recorded.__name__ = recorded.__qualname__ = "lazy"
        spec = StepSpec(
            entry="lazy", fn=recorded, batch=[*tensors, *generators],
            in_dims=[*dims, *(None for _ in generators)], model=used, has_aux=True, **how,
        )  # fmt: skip
        options = StepOptions(context=("lazy", place), predict=predict)
        result = run_step(spec, options, sys._getframe())
        values, terms = zip(*result.aux, strict=True)
        with torch.no_grad(), persist():
            whole = {
                n: self._labels[n].joined([part.pop(n) for part in values]) for n in self._kept
            }
        self._finish(whole, terms)
        if self._factors is None and self._root in self.values:
            # with the random numbers that its gradients are of
            with persist():
                self.values[self._root] = result.loss.clone()
        return result

    def _function(self, name: str, place: str) -> Any:
        """Return a method as a function that stands for the program, not for this run of it."""
        # a step tells places apart by what functions hold: an object that is new each time would
        # be another place each time, and be verified
        hidden = [self]

        def call(*args: Any, _reached: Any = None) -> Any:
            assert place
            return getattr(hidden[0], name)(*args)

        return call

    def _loss(self, batch: list[Tensor]) -> Any:
        """Return the loss of a part, its terms, or the inputs of its tail; and its values."""
        env, (values, terms) = self._part(batch)
        if self.plan.taken:
            loss: Any = [self._labels[n].apart(env[n]) for n in self.plan.taken]
        elif self._factors is None:
            loss = {str(n): self._pair(n, env[n], count) for n, (_, count) in terms.items()}
            # a second term takes two passes: in one, gradients in half precision would get what
            # then() multiplies by, such as the scale of a GradScaler, when they are zero already
            loss["none"] = torch.zeros_like(next(iter(terms.values()))[0])
        else:
            loss = torch.zeros_like(next(iter(terms.values()))[0])
            for n, (_, count) in terms.items():
                number = count if is_fake(count) else float(count)
                # the mean of nothing is nan, which no factor undoes
                if is_fake(count) or number:
                    slope, total = self._factors[n]
                    factor = slope if total is None else slope * (number / total)
                    loss = loss + widened(env[n]) * factor
        return loss, (values, terms)

    def _pair(self, number: int, value: Tensor, count: Any) -> Any:
        kind = self.plan.terms[number].verdict.reduces
        # classes with probabilities have a mean over samples, and no tensor as their count
        if kind == "counted" and isinstance(count, Tensor):
            # the mean of nothing is nan, and its part of the sum is zero
            return torch.where(count > 0, value * count, 0 * count), count
        # as a mean over samples it adds up to the sum over all
        return value * (self._tape.n_samples / count) if kind == "sum" else value

    def _factors_of_terms(self) -> dict[int, tuple[float, float | None]] | None:
        """Return the slope of the loss in each term, and what a mean divides by.

        None if these differ with the values of the terms, or a mean divides by zero.
        """
        terms = self.plan.terms
        if not is_linear(self.plan.tail, terms):
            return None
        slopes = self._slopes(1.0)
        if slopes != self._slopes(2.5):
            return None
        values, factors = {n: leaf.value for n, leaf in self._data.items()}, {}
        for (n, entry), slope in zip(terms.items(), slopes, strict=True):
            kind = entry.verdict.reduces
            total = count_of(entry, kind, values.__getitem__, self._tape.n_samples)
            if not total:
                return None
            factors[n] = slope, None if kind == "sum" else float(total)
        return factors

    def _slopes(self, value: float) -> list[float]:
        """Return the slopes of the loss where the terms are so large, each a little larger."""
        metas = [entry.shape.metas[0] for entry in self.plan.terms.values()]
        with torch.enable_grad():
            given = [
                torch.full(
                    (), value + 0.5 * i, dtype=meta.dtype, device=meta.device
                ).requires_grad_()
                for i, meta in enumerate(metas)
            ]
            loss = self._tail({n: each * 1 for n, each in zip(self.plan.terms, given, strict=True)})
            slopes = torch.autograd.grad(loss, given, allow_unused=True)
        return [0.0 if slope is None else float(slope) for slope in slopes]

    def _tail_trains(self) -> bool:
        """Tell whether the tail has parameters of its own."""
        reads = (n for entry in self.plan.tail for n in entry.reads if n in self._data)
        plains = [tensor for entry in self.plan.tail for tensor in entry.tensors]
        return any(t.requires_grad for t in (*plains, *(self._data[n].value for n in reads)))

    def _tail(self, given: dict[int, Any]) -> Tensor:
        """Run the calls from what is given to the loss."""
        assert self._root is not None
        env, handles = dict(given), self._tape.handles
        self._run(replayed(self.plan.tail, [*given, *handles, self._root]), env)
        if self.plan.taken:
            with persist():
                self._joined = {n: value.detach() for n, value in env.items() if n in handles}
                self._joined |= {n: env[n].detach() for n in given}
        root: Tensor = env[self._root]
        return root if root.dim() == 0 else root.reshape(())

    def _then(self, totals: dict[str, Tensor]) -> Tensor:
        return self._tail({n: totals[str(n)] * 1 for n in self.plan.terms})

    def _loss_of(self, outputs: list[Any]) -> Tensor:
        labels = self._labels
        taken = zip(self.plan.taken, outputs, strict=True)
        return self._tail({n: labels[n].back(value) for n, value in taken})


class _Used(nn.Module):
    """The tensors that recorded calls use and that were not recorded, in a module for a step.

    Those that they write into are its buffers, which a step brings back. The modules that called
    torch don't run again, so that none of them is seen.

    Args:
        entries: the calls.

    Attributes:
        trained: what gets gradients.
        constants: the other tensors.
    """

    def __init__(self, entries: list[RecordedCall]) -> None:
        super().__init__()
        for i, tensor in enumerate(written_by(entries)):
            self.register_buffer(f"buffer_{i}", tensor)
        plains = [tensor for entry in entries for tensor in entry.tensors]
        found = list({id(tensor): tensor for tensor in plains}.values())
        self.constants = [tensor for tensor in found if not tensor.requires_grad]
        self.trained = nn.Module()
        own: Any = self.trained._parameters
        own |= {str(i): t for i, t in enumerate(found) if t.requires_grad}
