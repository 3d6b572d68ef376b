"""Losses without graphs, of the whole batch and of its parts, and how far these are apart.

One forward pass of the whole batch, against the micro-batches that just ran: only it sees what a
few samples don't show, such as a fixed number of hard examples kept of all, one sample of many that
is masked, or an outlier.

Where random numbers can't be made the same for parts, samples are exchanged in two groups that lie
mixed by position, under one random state. What is a sum over samples changes by the same for one
group whatever the other holds: f(a, b) - f(a', b) - f(a, b') + f(a', b') is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._loss import ONLY, combined, finished_loss, terms_of, widened, widened_count
from .._modules import coupled_modules
from .._samples import JoinedOutputs, Outputs
from .._split import Chunk, ChunkTerms, StepOutcome, StepParts
from ._compare import EXCHANGED_RTOL, LOSSES, is_noise
from ._finding import CheckFinding, farthest
from ._modes import RoughRounding
from ._subject import Subject, comparable, first_that_fits, set_back, spread_samples

# Four runs for each of up to three states.
_MOST_SAMPLES = 8
_N_STATES = 3
Values = dict[str, Tensor]


def exchanged(subject: Subject) -> tuple[bool, CheckFinding | None]:
    """Exchange samples; whether that could be done, and what is no sum over samples."""
    n = min(_MOST_SAMPLES, subject.n_samples)
    sizes = [size for size in (n, n // 2) if size > 1]
    found = first_that_fits(lambda size: [_under_some_states(subject, size)], sizes)
    return (False, None) if found is None else (True, found[0])


def _under_some_states(subject: Subject, n: int) -> CheckFinding | None:
    """Exchange under a few random states: in one of them samples may mix by next to nothing."""
    # the draw between two states has to come back as well
    rng = subject.parts_of(range(n)).state.rng
    rng.begin()
    try:
        for _ in range(_N_STATES):
            if found := _exchange(subject, n):
                return found
            rng.draw()
        return None
    finally:
        rng.undo()


def _exchange(subject: Subject, n: int) -> CheckFinding | None:
    here = spread_samples(subject.tree, subject.n_samples, n)
    others = [i for i in range(subject.n_samples) if i not in here]
    # a small batch is exchanged with itself, in another order
    there = others[:n] if len(others) >= n else [*here[n // 2 :], *here[: n // 2]]
    values = []
    for first, second in ((here, here), (here, there), (there, here), (there, there)):
        parts = subject.parts_of([(first if i % 2 else second)[i] for i in range(n)])
        with comparable(parts, is_random=False), set_back(parts):
            values.append(_sums(parts))
    for name in values[0]:
        a, b, c, d = (float(each[name]) for each in values)
        largest = max(map(abs, (a, b, c, d)))
        if abs(a - b - c + d) > EXCHANGED_RTOL * largest:
            what = "the loss" if name == ONLY else f"the term {name!r}"
            error = abs(a - b - c + d) / largest
            return CheckFinding(
                f"{what}, summed up with half of its samples exchanged for others,",
                d, b + c - a, error, (n // 2, n - n // 2),
            )  # fmt: skip
    return None


class LossCheck:
    """Compares the losses.

    Args:
        subject: the step.
        outcome: what its micro-batches gave.
        scale: the loss of a few samples; what is much smaller than that counts as nothing.
        most: how many samples may be run.

    Attributes:
        finding: what differs.
    """

    def __init__(
        self,
        subject: Subject,
        outcome: StepOutcome,
        *,
        scale: float,
        most: int,
    ) -> None:
        self._subject = subject
        self._outcome = outcome
        self._scale = scale
        self._most = most
        self.finding: CheckFinding | None = None

    def compare(self) -> bool:
        """Compare them; whether that could be done, with whatever result."""
        n, size = self._subject.n_samples, max(self._outcome.sizes)
        # halves of the batch where the whole does not fit, down to one more than a micro-batch
        sizes = [n] if self._most >= n else []
        while n > size:
            n = max(n // 2, size + 1) if n > size + 1 else 0
            if size < n <= self._most:
                sizes.append(n)
        return bool(first_that_fits(self._compare, sizes) or self.finding is not None)

    def _compare(self, n_samples: int) -> bool:
        self.finding = None
        sizes = self._sizes(n_samples)
        whole = self._values(n_samples, [n_samples])
        if whole is None:
            return False
        # nothing needs to run again where the same samples gave the same numbers
        split = self._known(n_samples) or self._values(n_samples, sizes)
        assert split is not None
        results = [*whole.values(), *self._outcome.terms.values()]
        rtol = LOSSES.of(results, self._subject.types)
        for name, value in whole.items():
            error = self._error(value, split[name])
            if not error <= rtol:
                what = "the loss" if name == ONLY else f"the term {name!r}"
                # also if there is no room for more
                self.finding = CheckFinding(what, *farthest(value, split[name]), error, sizes)
                if not self._is_explained(name, value, error, n_samples):
                    return True
                self.finding = None
        return True

    def _sizes(self, n_samples: int) -> Sequence[int]:
        """Return the lengths of the parts of the first samples."""
        left, sizes = n_samples, []
        for size in self._outcome.sizes:
            if left > 0:
                sizes.append(min(size, left))
                left -= size
        return sizes

    def _known(self, n_samples: int) -> Values | None:
        """Return the values of micro-batches, unless they drew random numbers."""
        spec = self._subject.spec
        # outputs are added up by another loss here, and once() is no part of what is compared
        if self._subject.is_random or callable(spec.loss) or n_samples < self._subject.n_samples:
            return None
        if spec.batchnorm == "per_chunk" or spec.once is not None:
            return None
        return {**self._outcome.terms, ONLY: self._outcome.loss}

    def _values(
        self, n_samples: int, sizes: Sequence[int], *, rough: RoughRounding | None = None
    ) -> Values | None:
        """Return the values of the whole, or of parts; None if statistics can't be turned off."""
        is_whole = n_samples == self._subject.n_samples
        parts = self._subject.parts_of(None if is_whole else range(n_samples))
        with comparable(parts, is_random=self._subject.is_random, rough=rough):
            if parts.spec.batchnorm == "per_chunk" and coupled_modules(parts.roots):
                return None
            return split_values(parts, sizes)

    def _error(self, whole: Tensor, split: Tensor) -> float:
        # whatever asked for gradients in the block
        a, b = float(whole.detach()), float(split.detach())
        # nan on both sides is what plain torch gives as well
        if a == b or (a != a and b != b):
            return 0.0
        return abs(a - b) / max(abs(a), abs(b), self._scale)

    def _is_explained(self, name: str, value: Tensor, error: float, n_samples: int) -> bool:
        """Return whether rounding or unseen random numbers make such a difference too."""

        @functools.cache
        def noise(roughness: int, draw: int) -> float:
            rough = RoughRounding(roughness, draw) if roughness else None
            again = self._values(n_samples, [n_samples], rough=rough)
            assert again is not None
            return self._error(value, again[name])

        return is_noise(error, noise)


# --- what the function gives for samples, by term


@contextmanager
def unseen(parts: StepParts) -> Iterator[None]:
    """Open a block without graphs that undoes changes of buffers, attributes, random state."""
    parts.state.begin()
    try:
        with torch.no_grad(), parts.watching():
            yield
    finally:
        parts.state.undo()
        parts.state.finish()
        # weights that were cast without a graph get no gradient
        torch.clear_autocast_cache()


def split_values(parts: StepParts, sizes: Sequence[int]) -> Values:
    """Return the loss of samples in parts of these lengths, and its terms if there are several."""
    with unseen(parts):
        spec = parts.spec
        chunks = [Chunk(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
        if callable(spec.loss):
            returned = [_outputs(parts, chunk) for chunk in chunks]
            return {ONLY: spec.loss(JoinedOutputs(returned).value)}
        split = ChunkTerms(parts, chunks)
        each = [split.of(i) for i in range(len(chunks))]
        terms = combined([one.detached().by_name for one in each], split.shares, split.reduction)
        return _with_loss(terms, finished_loss(terms, each[0].named, spec.then))


def _sums(parts: StepParts) -> Values:
    """Return the parts of terms that are sums over samples, if declared rightly."""
    with unseen(parts):
        spec, inputs = parts.spec, parts.inputs
        returned = parts.call(inputs.whole())
        if callable(spec.loss):
            return {ONLY: spec.loss(returned)}
        terms = terms_of(returned, spec.loss)
        found: Values = {}
        weight = parts.n_samples if spec.weight is None else spec.weight(inputs.whole())
        for name, term in terms.by_name.items():
            if term.count is not None:
                found[f"{name}: sum"] = widened(term.value)
                found[f"{name}: count"] = torch.as_tensor(widened_count(term.count))
            else:
                found[name] = widened(term.value) * _factor(spec.loss, weight, name)
        return {name: torch.nan_to_num(value.double().cpu()) for name, value in found.items()}


def _factor(reduction: object, weight: Any, name: str) -> Any:
    if reduction == "sum":
        return 1
    return weight.get(name, 1) if hasattr(weight, "get") else weight


def _outputs(parts: StepParts, chunk: Chunk) -> Outputs:
    returned = parts.call(parts.inputs.chunk(*chunk))
    return Outputs(returned, parts.spec.out_dims, chunk.length).detached()


def _with_loss(terms: Values, loss: Tensor) -> Values:
    return {ONLY: loss} if len(terms) == 1 else {**terms, ONLY: loss}
