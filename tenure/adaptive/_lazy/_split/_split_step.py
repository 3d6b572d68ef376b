"""A loss that was recorded, run in micro-batches by the machinery of `step`.

Invariant: the function of a micro-batch is the recorded program on it; what wants all samples runs
once, on what the micro-batches gave.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tenure.scopes import persist

from ..._step import StepOptions, StepResult, StepSpec, run_step
from .._tape import Entry, plain_tensors, replayed, written_by
from ._gathered import Gathered, Total, sample_dim, with_samples_apart, with_samples_back
from ._program import Program
from ._terms import count_of, reads_of_count


class _Changed(nn.Module):
    """What recorded calls write into, as the buffers of a module, which a step brings back.

    The modules that called torch don't run again, so that none of them is seen.

    Args:
        entries: the calls.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        super().__init__()
        for i, tensor in enumerate(written_by(entries)):
            self.register_buffer(f"buffer_{i}", tensor)


class SplitStep:
    """One loss that was recorded, and how it is run in parts.

    Args:
        program: what was recorded.
        root: the number of the loss.

    Attributes:
        values: the values that somebody has, after it ran.
    """

    def __init__(self, program: Program, root: int) -> None:
        self._program, self._root = program, root
        self._plan, self._tape, self._labels = program.plan, program.tape, program.labels
        self.values: dict[int, Tensor] = {}
        self._gathered: dict[int, Gathered] = {}
        self._joined: dict[int, Tensor] = {}
        self._totals: dict[int, Total] = {}
        self._counts = self._entries_of_counts()
        self._changed = _Changed([*self._plan.chunk, *self._plan.tail])
        # what a factor is trained by would get no gradient
        self._is_affine = self._plan.is_affine and not self._tail_trains()

    # --- what step() gets

    def run(self, place: str, *, predict: bool = False) -> StepResult:
        """Run it; gradients are where those of a backward pass are.

        Args:
            place: what sizes are remembered for.
            predict: whether to begin with the size that is predicted to fit, if none is known.
        """
        tensors, dims = self._program.batch()
        # what a step is given is put back when an attempt fails
        generators = list(self._tape.generators.values())
        batch, in_dims = [*tensors, *generators], [*dims, *(None for _ in generators)]
        plan = self._plan
        how: dict[str, Any] = {"model": self._changed}
        if not plan.terms:
            labels = [self._labels[n] for n in (*plan.frontier, *self._program.kept)]
            how |= {
                "loss": self._function("_loss_of_outputs", place),
                "out_dims": [sample_dim(each) for each in labels],
            }
        else:
            kinds = {entry.verdict.reduces for entry in plan.terms.values()}
            if self._is_plain_sum():
                how["loss"] = "sum"
            elif self._counts is not None and "counted" in kinds:
                how["weight"] = self._function("_weights", place)
            if not self._is_affine:
                how["then"] = self._function("_then", place)
        recorded = self._function("_terms" if plan.terms else "_outputs", place)
        if predict:
            recorded.__kwdefaults__ = {"_reached": self._captured()}
        recorded.__name__ = recorded.__qualname__ = "lazy"
        spec = StepSpec(entry="lazy", fn=recorded, batch=batch, in_dims=in_dims, **how)
        options = StepOptions(context=("lazy", place), predict=predict)
        result = run_step(spec, options, sys._getframe())
        self._finish(result)
        return result

    def _function(self, name: str, place: str) -> Any:
        """A method as a function that stands for the program, not for this run of it."""
        # a step tells places apart by what functions hold: an object that is new each time would
        # be another place each time, and be verified
        hidden = [self]

        def call(*args: Any, _reached: Any = None) -> Any:
            assert place
            return getattr(hidden[0], name)(*args)

        return call

    def _captured(self) -> tuple[nn.Module, list[Tensor]]:
        """What was not recorded: a prediction lends it, and has to know it before."""
        entries = (*self._plan.chunk, *self._plan.tail)
        found = {id(t): t for e in entries for t in plain_tensors((e.args, e.kwargs))}.values()
        # constants are in no module, whose state a step writes back
        return _Parameters(t for t in found if t.requires_grad), [
            t for t in found if not t.requires_grad
        ]

    # --- a sum or a mean over samples

    def _is_plain_sum(self) -> bool:
        kinds = {entry.verdict.reduces for entry in self._plan.terms.values()}
        return kinds == {"sum"} and not self._plan.tail

    def _terms(self, batch: list[Tensor]) -> Any:
        env, length = self._program.env(batch)
        start = self._program.start_of(batch)
        plan, n = self._plan, self._tape.n_samples
        counts: dict[int, Any] = {}

        def done(entry: Entry) -> None:
            number = entry.outs[0] if entry.outs else None
            if number in plan.terms and entry.verdict.reduces == "counted":
                counts[number] = count_of(entry, lambda i: env[i], length)

        self._program.run_chunk(env, length, done=done)
        self._note(env, start, length, counts)
        if self._is_plain_sum():
            return env[next(iter(plan.terms))]
        values = {}
        for number, entry in plan.terms.items():
            value, kind = env[number], entry.verdict.reduces
            # as a mean over samples it adds up to the sum over all
            values[number] = value * (n / length) if kind == "sum" else value
        if self._is_affine and plan.tail:
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
        return found, constant.detach()

    def _tail_trains(self) -> bool:
        """Whether the tail has parameters of its own."""
        plains = [t for e in self._plan.tail for t in plain_tensors((e.args, e.kwargs))]
        data = self._program.data
        leaves = [data[n].value for e in self._plan.tail for n in e.reads if n in data]
        return any(tensor.requires_grad for tensor in (*plains, *leaves))

    def _tail(self, given: dict[int, Any]) -> Tensor:
        env = dict(given)
        self._program.run(replayed(self._plan.tail, [self._root]), env)
        return _scalar(env[self._root])

    def _then(self, totals: dict[str, Tensor]) -> Tensor:
        return self._tail(
            {number: totals[f"term {i}"] * 1 for i, number in enumerate(self._plan.terms)}
        )

    # --- what terms weigh

    def _entries_of_counts(self) -> list[Entry] | None:
        """The calls that make what is counted, of the batch alone; None: it is made of more."""
        wanted = {n for e in self._plan.terms.values() for n in reads_of_count(e)}
        if wanted & self._plan.written:
            return None
        found: list[Entry] = []
        for entry in reversed(self._plan.chunk):
            if any(n in wanted for n in entry.outs if n is not None):
                if entry.shape.changed or any(m.requires_grad for m in entry.shape.metas):
                    return None
                found.append(entry)
                wanted.update(entry.reads)
        made = {n for entry in found for n in entry.outs}
        is_known = all(n in made or n in self._program.data for n in wanted)
        return found[::-1] if is_known and len(found) < 32 else None

    def _weights(self, batch: list[Tensor]) -> dict[str, Any]:
        env, length = self._program.env(batch)
        assert self._counts is not None
        kept = [n for e in self._plan.terms.values() for n in reads_of_count(e)]
        self._program.run(replayed(self._counts, kept), env, length)
        weights: dict[str, Any] = {}
        for i, entry in enumerate(self._plan.terms.values()):
            is_counted = entry.verdict.reduces == "counted"
            weights[f"term {i}"] = (
                count_of(entry, lambda n: env[n], length) if is_counted else length
            )
        weights["constant"] = length
        return weights

    # --- any other loss

    def _outputs(self, batch: list[Tensor]) -> list[Any]:
        env, length = self._program.env(batch)
        self._program.run_chunk(env, length)
        return [
            with_samples_apart(env[n], self._labels[n])
            for n in (*self._plan.frontier, *self._program.kept)
        ]

    def _loss_of_outputs(self, outputs: list[Any]) -> Tensor:
        numbers = (*self._plan.frontier, *self._program.kept)
        env = {
            n: with_samples_back(value, self._labels[n])
            for n, value in zip(numbers, outputs, strict=True)
        }
        self._joined = {n: env[n].detach() for n in numbers}
        found = {n: value for n, value in self._joined.items() if n in self._tape.handles}
        live = [n for e in self._plan.tail for n in e.outs if n in self._tape.handles]
        self._program.run(replayed(self._plan.tail, [*live, self._root, *numbers]), env)
        with persist():
            self.values = found | {n: env[n].detach() for n in live if n in env}
        return _scalar(env[self._root])

    # --- values that somebody has

    def _note(
        self, env: dict[int, Any], start: int | None, length: int, counts: dict[int, Any]
    ) -> None:
        if start is None:
            return
        # another attempt starts over
        if not start:
            n_samples, kept = self._tape.n_samples, self._program.kept
            self._gathered = {n: Gathered(self._labels[n], n_samples) for n in kept}
            self._totals = {n: Total() for n in self._plan.terms}
        for number, gathered in self._gathered.items():
            gathered.add(env[number], start, length)
        with torch.no_grad(), persist():
            for number, total in self._totals.items():
                kind = self._plan.terms[number].verdict.reduces
                total.add(env[number].detach(), kind, counts.get(number, length))

    def _finish(self, result: StepResult) -> None:
        with torch.no_grad(), persist():
            if self._plan.terms:
                self.values = {n: g.value() for n, g in self._gathered.items()}
                self.values |= {n: t.value() for n, t in self._totals.items()}
            env: dict[int, Any] = self._joined | self.values
            late = [*self._plan.tail, *self._plan.others] if self._plan.terms else self._plan.others
            self.values |= self._program.late(late, env)
            self.values[self._root] = result.loss.clone()


def _scalar(root: Tensor) -> Tensor:
    """A loss of one element as one of no dimension."""
    return root if root.dim() == 0 else root.reshape(())


class _Parameters(nn.Module):
    """What gets gradients and was not recorded, where who looks for a function's finds all."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        own: Any = self._parameters
        own |= {str(i): tensor for i, tensor in enumerate(tensors)}
