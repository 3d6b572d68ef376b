"""What was recorded, run in micro-batches by the machinery of `step`: its function and its terms.

Invariant: the function of a micro-batch is the recorded program on it; what wants all samples runs
once, on what the micro-batches gave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tenure._storages import storage_key
from tenure.scopes import persist

from .._step import StepResult, step
from ._gathered import Gathered, with_samples_apart, with_samples_back
from ._labels import SHARED, Label
from ._split_plan import SplitPlan, plain_tensors
from ._tape import Entry, Leaf, Tape, check_unwritten, leaf_of, replayed, run
from ._terms import count_of, reads_of_count


class SplitStep:
    """One loss that was recorded, and how it is run in parts.

    Args:
        tape: what was recorded.
        root: the number of the loss; None: only values are wanted.
        plan: how to split it.
        labels: where the values have their samples, by number.

    Attributes:
        values: the values that somebody has, after it ran.
    """

    def __init__(
        self, tape: Tape, root: int | None, plan: SplitPlan, labels: dict[int, Label]
    ) -> None:
        self._tape, self._root, self._plan, self._labels = tape, root, plan, labels
        self._n = tape.n_samples
        check_unwritten(tape.entries, tape.leaves)
        self.values: dict[int, Tensor] = {}
        self._data = _run_before(tape, plan, labels)
        self._numbers = list(self._data)
        self._kept = self._wanted()
        self._last = [*self._kept, *plan.terms, *plan.frontier]
        self._chunk = replayed(plan.chunk, self._last)
        self._before = {
            n: leaf.value for n, leaf in self._data.items()
            if n in tape.handles and n not in tape.leaves
        }  # fmt: skip
        self._gathered: dict[int, Gathered] = {}
        self._joined: dict[int, Tensor] = {}
        self._totals: dict[int, _Total] = {}
        self._counts = self._entries_of_counts()

    # --- what step() gets

    def run(self, place: str, **options: Any) -> StepResult:
        """Run it; gradients are where those of a backward pass are."""
        cut = [self._cut(number) for number in self._numbers]
        batch, in_dims = [value for value, _ in cut], [dim for _, dim in cut]
        plan = self._plan
        how: dict[str, Any] = {}
        if not plan.terms:
            labels = [self._labels[n] for n in (*plan.frontier, *self._kept)]
            how = {
                "loss": self._function("_loss_of_outputs", place),
                "out_dims": [_out_dim(each) for each in labels],
            }
        else:
            kinds = {entry.shape.metas[0].label.kind for entry in plan.terms.values()}
            if self._is_plain_sum():
                how["loss"] = "sum"
            elif self._counts is not None and "counted" in kinds:
                how["weight"] = self._function("_weights", place)
            if not plan.is_affine:
                how["then"] = self._function("_then", place)
        recorded = self._function("_terms" if plan.terms else "_outputs", place)
        recorded.__name__ = recorded.__qualname__ = "lazy"
        result = step(recorded, batch, in_dims=in_dims, context=("lazy", place), **how, **options)
        self._finish(result)
        return result

    def _function(self, name: str, place: str) -> Any:
        """A method as a function that stands for the program, not for this run of it."""
        # a step tells places apart by what functions hold: an object that is new each time would
        # be another place each time, and be verified
        hidden = [self]

        def call(*args: Any) -> Any:
            assert place
            return getattr(hidden[0], name)(*args)

        return call

    def _cut(self, number: int) -> tuple[Tensor, int | None]:
        leaf = self._data[number]
        if not leaf.label.is_batch:
            return leaf.value, None
        return with_samples_apart(leaf.value, leaf.label)

    def _env(self, batch: list[Tensor]) -> tuple[dict[int, Any], int]:
        env, length = {}, self._n
        for number, piece in zip(self._numbers, batch, strict=True):
            leaf = self._data[number]
            label = leaf.label
            if label.is_batch:
                dim = label.dim if label.outer == label.inner == 1 else label.dim + 1
                length = piece.shape[dim]
                piece = with_samples_back(piece, label)
                # a part along a later dimension has gaps, and can't be viewed in all shapes
                if label.dim and leaf.value.is_contiguous():
                    piece = piece.contiguous()
            # the user's own tensor is not written: the recorded one is
            env[number] = piece.clone() if number in self._tape.written else piece
        return env, length

    # --- a sum or a mean over samples

    def _is_plain_sum(self) -> bool:
        kinds = {entry.shape.metas[0].label.kind for entry in self._plan.terms.values()}
        return kinds == {"sum"} and not self._plan.tail

    def _terms(self, batch: list[Tensor]) -> Any:
        env, length = self._env(batch)
        start = self._start_of(batch)
        plan, n = self._plan, self._n
        counts: dict[int, Any] = {}

        def done(entry: Entry) -> None:
            number = entry.outs[0] if entry.outs else None
            if number in plan.terms and entry.shape.metas[0].label.kind == "counted":
                counts[number] = count_of(entry, lambda i: env[i], length)

        run(self._chunk, env, self._tape.kind, length, done=done)
        self._note(env, start, length, counts)
        if self._is_plain_sum():
            return env[next(iter(plan.terms))]
        values = {}
        for number, entry in plan.terms.items():
            value, kind = env[number], entry.shape.metas[0].label.kind
            # as a mean over samples it adds up to the sum over all
            values[number] = value * (n / length) if kind == "sum" else value
        if plan.is_affine and plan.tail:
            slopes, constant = self._slopes(values, env)
            values = {number: value * slopes[number] for number, value in values.items()}
        else:
            constant = None
        named: dict[str, Any] = {
            f"term {i}": self._with_count(number, values[number], counts)
            for i, number in enumerate(plan.terms)
        }
        if constant is not None:
            named["constant"] = constant
        return named

    def _with_count(self, number: int, value: Tensor, counts: dict[int, Any]) -> Any:
        if number not in counts or self._counts is not None:
            return value
        # the mean of nothing is nan, and its part of the sum is zero
        return torch.where(counts[number] > 0, value * counts[number], 0 * counts[number]), counts[
            number
        ]

    def _slopes(
        self, values: dict[int, Tensor], env: dict[int, Any]
    ) -> tuple[dict[int, Tensor], Tensor]:
        """What the root grows by with each term, and what it is without them."""
        with torch.enable_grad():
            zeros = {n: torch.zeros_like(v).requires_grad_() for n, v in values.items()}
            constant = self._tail({n: zero * 1 for n, zero in zeros.items()})
            slopes = torch.autograd.grad(
                constant, list(zeros.values()), retain_graph=True, allow_unused=True
            )
        found = {
            n: torch.zeros_like(zeros[n]) if slope is None else slope
            for n, slope in zip(zeros, slopes, strict=True)
        }
        return found, constant if self._tail_trains() else constant.detach()

    def _tail_trains(self) -> bool:
        """Whether the tail has parameters of its own."""
        plains = [t for e in self._plan.tail for t in plain_tensors((e.args, e.kwargs))]
        leaves = [self._data[n].value for e in self._plan.tail for n in e.reads if n in self._data]
        return any(tensor.requires_grad for tensor in (*plains, *leaves))

    def _tail(self, given: dict[int, Any]) -> Tensor:
        env = dict(given)
        keep = [self._root] if self._root is not None else []
        run(replayed(self._plan.tail, keep), env, self._tape.kind, others=self._data)
        root: Tensor = env[self._root]  # type: ignore[index]
        return root if root.dim() == 0 else root.reshape(())

    def _then(self, totals: dict[str, Tensor]) -> Tensor:
        return self._tail(
            {number: totals[f"term {i}"] * 1 for i, number in enumerate(self._plan.terms)}
        )

    # --- what terms weigh

    def _entries_of_counts(self) -> list[Entry] | None:
        """The calls that make what is counted, of the batch alone; None: it is made of more."""
        wanted = {n for e in self._plan.terms.values() for n in reads_of_count(e)}
        found: list[Entry] = []
        for entry in reversed(self._plan.chunk):
            if any(n in wanted for n in entry.outs if n is not None):
                if entry.shape.changed or any(m.requires_grad for m in entry.shape.metas):
                    return None
                found.append(entry)
                wanted.update(entry.reads)
        made = {n for entry in found for n in entry.outs}
        is_known = all(n in made or n in self._data for n in wanted)
        return found[::-1] if is_known and len(found) < 32 else None

    def _weights(self, batch: list[Tensor]) -> dict[str, Any]:
        env, length = self._env(batch)
        assert self._counts is not None
        kept = [n for e in self._plan.terms.values() for n in reads_of_count(e)]
        run(replayed(self._counts, kept), env, self._tape.kind, length)
        weights: dict[str, Any] = {}
        for i, entry in enumerate(self._plan.terms.values()):
            is_counted = entry.shape.metas[0].label.kind == "counted"
            weights[f"term {i}"] = (
                count_of(entry, lambda n: env[n], length) if is_counted else length
            )
        weights["constant"] = length
        return weights

    # --- any other loss

    def _outputs(self, batch: list[Tensor]) -> list[Any]:
        env, length = self._env(batch)
        run(self._chunk, env, self._tape.kind, length)
        return [
            with_samples_apart(env[n], self._labels[n])[0] if self._labels[n].is_batch else env[n]
            for n in (*self._plan.frontier, *self._kept)
        ]

    def _loss_of_outputs(self, outputs: list[Any]) -> Tensor:
        numbers = (*self._plan.frontier, *self._kept)
        env = {
            n: with_samples_back(value, self._labels[n]) if self._labels[n].is_batch else value
            for n, value in zip(numbers, outputs, strict=True)
        }
        self._joined = {n: env[n].detach() for n in numbers}
        found = {n: value for n, value in self._joined.items() if n in self._tape.handles}
        live = [n for e in self._plan.tail for n in e.outs if n in self._tape.handles]
        assert self._root is not None
        run(
            replayed(self._plan.tail, [*live, self._root, *numbers]), env, self._tape.kind,
            others=self._data,
        )  # fmt: skip
        root: Tensor = env[self._root]
        with persist():
            self.values = found | {n: env[n].detach() for n in live if n in env}
        return root if root.dim() == 0 else root.reshape(())

    # --- values that somebody has

    def _wanted(self) -> list[int]:
        """The values of parts that are kept: somebody has them, or has what is made of them."""
        plan, tape = self._plan, self._tape
        made = {n for e in plan.chunk if e.shape.kind == "chunk" for n in e.outs if n is not None}
        wanted = {n for n in made if n in tape.handles}
        late = plan.others if plan.terms or plan.frontier else [*plan.tail, *plan.others]
        needed = {n for e in late for n in e.outs if n in tape.handles}
        for entry in reversed(late):
            if any(n in needed for n in entry.outs if n is not None):
                needed.update(entry.reads)
        found: list[int] = sorted(wanted | (needed & made))
        return [n for n in found if n not in plan.frontier] if plan.frontier else found

    def _start_of(self, batch: list[Tensor]) -> int | None:
        """Where a part of the batch begins; None for other samples than those of the batch."""
        # what only looks (a verification) runs without gradients, or on copies
        if not torch.is_grad_enabled():
            return None
        for number, piece in zip(self._numbers, batch, strict=True):
            leaf = self._data[number]
            if not leaf.label.is_batch:
                continue
            whole, dim = self._cut(number)
            assert dim is not None
            if whole.stride(dim) and storage_key(piece) == storage_key(whole):
                past = int(piece.storage_offset()) - int(whole.storage_offset())
                return past // whole.stride(dim)
            if whole.stride(dim):
                return None
        return None

    def _note(
        self, env: dict[int, Any], start: int | None, length: int, counts: dict[int, Any]
    ) -> None:
        if start is None:
            return
        # another attempt starts over
        if not start:
            self._gathered = {n: Gathered(self._labels[n], self._n) for n in self._kept}
            self._totals = {n: _Total() for n in self._plan.terms}
        for number, gathered in self._gathered.items():
            gathered.add(env[number], start, length)
        with torch.no_grad(), persist():
            for number, total in self._totals.items():
                kind = self._plan.terms[number].shape.metas[0].label.kind
                total.add(env[number].detach(), kind, counts.get(number, length))

    def _finish(self, result: StepResult) -> None:
        with torch.no_grad(), persist():
            if self._plan.terms:
                self.values = {n: g.value() for n, g in self._gathered.items()}
                self.values |= {n: t.value() for n, t in self._totals.items()}
            env: dict[int, Any] = self._joined | self.values
            late = [*self._plan.tail, *self._plan.others] if self._plan.terms else self._plan.others
            self.values |= run_late(late, env, self._tape, self._data) | self._before
            if self._root is not None:
                self.values[self._root] = result.loss.clone()

    # --- values alone

    def piece(self, start: int, end: int) -> None:
        """Run a part of the batch for the values that somebody has."""
        batch = []
        for number in self._numbers:
            value, dim = self._cut(number)
            batch.append(value if dim is None else value.narrow(dim, start, end - start))
        with torch.no_grad():
            env, length = self._env(batch)
            run(self._chunk_without_graph(), env, self._tape.kind, length)
            for number in self._kept:
                if number not in self._gathered:
                    self._gathered[number] = Gathered(self._labels[number], self._n)
                self._gathered[number].add(env[number], start, length)

    def _chunk_without_graph(self) -> Any:
        entries = [
            entry if not entry.modes.grad else _without_grad(entry) for entry in self._plan.chunk
        ]
        return replayed(entries, self._last)

    def finish_values(self) -> None:
        """All parts ran."""
        with torch.no_grad(), persist():
            env = {n: gathered.value() for n, gathered in self._gathered.items()}
            self.values = dict(env)
            self.values |= run_late(self._plan.others, env, self._tape, self._data) | self._before


def run_late(
    entries: Iterable[Entry], env: dict[int, Any], tape: Tape, data: dict[int, Leaf]
) -> dict[int, Tensor]:
    """Run what wants all samples, for those of its values that somebody has."""
    live = {n for e in entries for n in e.outs if n in tape.handles}
    needed, found = set(live), []
    for entry in reversed(list(entries)):
        makes = [n for n in entry.outs if n is not None]
        is_known = all(n in env for n in makes) and bool(makes)
        if not is_known and (any(n in needed for n in makes) or entry.shape.changed):
            found.append(_without_grad(entry))
            needed.update(entry.reads)
    runnable = [entry for entry in found[::-1] if entry.shape.kind != "hook"]
    run(replayed(runnable, live), env, tape.kind, others=data)
    return {n: env[n].detach() for n in live if n in env}


def _without_grad(entry: Entry) -> Entry:
    return Entry(
        entry.seq, entry.func, entry.args, entry.kwargs, entry.modes._replace(grad=False),
        entry.outs, entry.reads, entry.shape, entry.plains, entry.site,
    )  # fmt: skip


def _out_dim(label: Label) -> int | None:
    if not label.is_batch:
        return None
    return label.dim if label.outer == label.inner == 1 else label.dim + 1


def _run_before(tape: Tape, plan: SplitPlan, labels: dict[int, Label]) -> dict[int, Leaf]:
    """Everything that parts are made of: leaves, and what is made of the batch alone."""
    data = dict(tape.leaves)
    if not plan.before:
        return data
    env: dict[int, Any] = {
        n: leaf.value.clone() if n in tape.written else leaf.value for n, leaf in data.items()
    }
    made = [n for entry in plan.before for n in entry.outs if n is not None]
    with torch.no_grad(), persist():
        run(replayed(plan.before, [*made, *env]), env, tape.kind)
    for number in made:
        data[number] = leaf_of(env[number], labels.get(number, SHARED))
    return data


class _Total:
    """The value of a term over all samples."""

    def __init__(self) -> None:
        self._sum: Any = 0
        self._weight: Any = 0

    def add(self, value: Tensor, kind: str, weight: Any) -> None:
        """Take the value of some samples."""
        if kind == "sum":
            self._sum, self._weight = self._sum + value, 1
            return
        # of no valid label
        empty = weight == 0
        if isinstance(empty, Tensor):
            value = torch.where(empty, torch.zeros_like(value), value)
        self._sum = self._sum + value * weight
        self._weight = self._weight + weight

    def value(self) -> Tensor:
        """All of it."""
        total: Tensor = self._sum / self._weight
        return total
