"""A split step whose loss is a mean or a sum over samples, or several of them.

Three ways, the cheapest that is exact: with weights that are known, one pass; with one weight that
is known only at the end, one pass, and the gradients are multiplied by it then; with several such
weights, a pass without graphs that finds them, and another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenure._errors import AdaptiveUsageError

from .._torch_dispatch import without_functions
from ._precision import widened, widened_count, widest_float
from ._shares import Shares
from ._spec import Chunk
from ._terms import (
    Count,
    Reduction,
    Term,
    Terms,
    check_same_terms,
    check_weight_is_used,
    combined,
    finished_loss,
    terms_of,
)
from ._two_pass import two_passes

if TYPE_CHECKING:
    from ._run import StepRun


class TermsPass:
    """Forward and backward of each chunk, weighted.

    Args:
        run: the step.
        chunks: how it is split.
    """

    def __init__(self, run: StepRun, chunks: Sequence[Chunk]) -> None:
        self._run = run
        self._chunks = chunks
        assert not callable(run.spec.loss)
        self._reduction: Reduction = run.spec.loss
        self._shares = Shares([chunk.length for chunk in chunks], self._weights())
        self._then = run.spec.then

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run it; the loss, and its terms."""
        first = self._terms(0)
        check_weight_is_used(first, self._run.spec.weight)
        self._names, self._named = list(first.by_name), first.named
        late = [name for name, term in first.by_name.items() if term.count is not None]
        if len(self._names) > 1 and (late or self._then is not None):
            del first
            return self._surveyed()
        self._totals = {name: _Total(self._guess(term)) for name, term in first.by_name.items()}
        self._take(0, first)
        del first  # its graph must not be there beside the next one
        for i in range(1, len(self._chunks)):
            self._take(i, self._terms(i))
        values = {name: total.value() for name, total in self._totals.items()}
        return self._rescaled(values), values

    def _terms(self, i: int) -> Terms:
        returned = self._run.forward(self._chunks[i])
        with without_functions():
            return terms_of(returned, self._reduction)

    def _weights(self) -> list[object] | None:
        weight, inputs = self._run.spec.weight, self._run.inputs
        if weight is None:
            return None
        with torch.no_grad():
            return [weight(inputs.chunk(*chunk)) for chunk in self._chunks]

    # --- in one pass

    def _take(self, i: int, terms: Terms) -> None:
        """Send the gradient of one chunk back, and count its terms in."""
        check_same_terms(self._names, terms.by_name)
        values, seeds = [], []
        with without_functions():  # nothing here outlives the step
            for name, term in terms.by_name.items():
                share = self._share(name, i)
                if share:  # the mean of no elements is nan, which a weight of zero does not undo
                    total = self._totals[name]
                    total.add(term, share)
                    values.append(term.value)
                    seeds.append(self._run.backward.scaled(total.seed(term.value, share)))
        self._run.send_back(values, seeds)

    def _share(self, name: str, i: int) -> float:
        if self._reduction == "sum" or self._totals[name].is_late:
            return 1.0
        return self._shares.of(name)[i]

    def _guess(self, term: Term) -> Count | None:
        """One part of what a late weight will be, so that half-precision gradients stay in range.

        A power of two, so that multiplying by it and dividing by it later is exact.
        """
        if term.count is None:
            return None
        n_samples, length = self._run.n_samples, self._chunks[0].length
        if isinstance(term.count, Tensor):
            finite = term.count.float().nan_to_num(posinf=1.0)
            expected = finite.clamp(min=1) * (n_samples / length)
            return torch.exp2(-expected.log2().round())
        count = term.count if math.isfinite(term.count) else 1
        return 2.0 ** -round(math.log2(max(count, 1) * n_samples / length))

    def _rescaled(self, values: dict[str, Tensor]) -> Tensor:
        """Give the gradients the weight that is known now."""
        (total, *others) = self._totals.values()
        loss, leaves = None, {}
        factor: Tensor | None = None if others else total.factor()
        if self._then is not None:
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            loss = finished_loss(leaves, self._named, self._then)
            slope = _slope(loss, next(iter(leaves.values())))
            factor = slope if factor is None else factor * slope
        if factor is not None:
            self._run.scale(factor)
        if loss is not None:  # what then() itself is trained by comes after the factor
            scaled = self._run.backward.scaled(loss)
            self._run.backward.run([scaled], [None], leaves.values())
            return loss.detach()
        return finished_loss(values, self._named, None)

    # --- in two passes

    def _surveyed(self) -> tuple[Tensor, dict[str, Tensor]]:
        self._run.inputs.run_again()
        self._run.state.undo()
        two_passes(
            len(self._chunks),
            self._forward,
            self._differentiate,
            self._run.send_back,
            modules=self._run.modules,
            devices=self._run.devices,
            generators=self._run.generators,
        )
        return self._loss, self._values

    def _forward(self, i: int) -> tuple[dict[str, Term], list[Tensor]]:
        terms = self._terms(i)
        check_same_terms(self._names, terms.by_name)
        tensors = [terms.by_name[name].value for name in self._names]
        return terms.detached().by_name, tensors

    def _differentiate(self, chunks: list[dict[str, Term]]) -> list[list[Tensor | None]]:
        self._run.inputs.run_again()
        with torch.enable_grad():
            leaves = [term.value.requires_grad_() for chunk in chunks for term in chunk.values()]
            values = combined(chunks, self._shares, self._reduction)
            loss = finished_loss(values, self._named, self._then)
            self._run.backward.run([self._run.backward.scaled(loss)], [None], leaves)
        self._loss = loss.detach()
        self._values = {name: value.detach() for name, value in values.items()}
        return [[chunk[name].value.grad for name in self._names] for chunk in chunks]


class _Total:
    """A term summed over the chunks so far.

    Args:
        guess: a weight near the right one, if that is known only at the end.
    """

    def __init__(self, guess: Count | None) -> None:
        self._sum: Tensor | None = None
        self._count: Any = 0
        self._guess = guess

    @property
    def is_late(self) -> bool:
        """Whether its weight is known only at the end."""
        return self._guess is not None

    def add(self, term: Term, share: float) -> None:
        value = widened(term.value.detach()) * share
        self._sum = value if self._sum is None else self._sum + value
        if term.count is not None:
            self._count = self._count + widened_count(term.count)

    def seed(self, value: Tensor, share: float) -> Tensor:
        """What the gradient of the term for a chunk is multiplied by now."""
        if isinstance(self._guess, Tensor):
            return self._guess.to(value)
        return torch.full_like(value, share if self._guess is None else self._guess)

    def factor(self) -> Tensor | None:
        """What it is to be multiplied by later; None for 1."""
        if self._guess is None:
            return None
        assert self._sum is not None
        device = self._sum.device
        count = torch.as_tensor(self._count, device=device).to(widest_float(device))
        return 1 / (count * self._guess)

    def value(self) -> Tensor:
        """The term of the whole batch."""
        assert self._sum is not None  # shares sum up to 1, so one of them is not zero
        return self._sum / self._count if self.is_late else self._sum


def _slope(loss: Tensor, total: Tensor) -> Tensor:
    if loss.requires_grad:
        (slope,) = torch.autograd.grad(loss, total, retain_graph=True, allow_unused=True)
        if slope is not None:
            return slope
    raise AdaptiveUsageError(
        "then() of step() returned what is no function of the loss it got, so that no gradient "
        "comes back from it. Compute its result from its argument, with gradients enabled."
    )
