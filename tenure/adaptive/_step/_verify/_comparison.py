"""A split against the whole: gradients of a few samples, and the loss of the whole batch.

Values alone do not do: a loss may be zero either way, as in the first epoch of PPO, and its
gradient be off by a third. And a few samples don't show all: a fixed number of hard examples kept
of all, one sample of many that is masked, or an outlier. So the whole batch runs forward once.

Where random numbers can't be made the same for parts, samples are exchanged in two groups that lie
mixed by position, under one random state. What is a sum over samples changes by the same for one
group whatever the other holds: f(a, b) - f(a', b) - f(a, b') + f(a', b') is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tenure._torch.quiet import without_functions

from ..._undo import RngState
from .._loss import ONLY, combined, copied, finished_loss, terms_of, widened, widened_count
from .._modules import coupled_modules
from .._outputs import JoinedOutputs, Outputs
from .._parts import Chunk, StepParts
from .._split import ChunkTerms, StepOutcome
from ._compare import (
    EXCHANGED_RTOL,
    GRADIENTS,
    LOSSES,
    CheckFinding,
    SplitDifference,
    Tolerance,
    is_noise,
)
from ._modes import RoughRounding
from ._observed import Observed, differences, told_of, worst
from ._subject import Subject, chosen_samples, first_that_fits, spread_samples

_MOST_SAMPLES = 8
# random states under which samples are exchanged, with four runs for each
_N_STATES = 3
_Run = Callable[[RoughRounding | None], Observed | None]


class SplitComparison:
    """Compares parts of a step with the whole.

    Args:
        subject: the step.

    Attributes:
        finding: what differs.
        is_coupled: whether modules mix samples, as was allowed, and can't be kept from it.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.finding: CheckFinding | None = None
        self.is_coupled = False
        # of the loss of a few samples; what is much smaller counts as nothing
        self._scale = 0.0

    def samples(self) -> bool:
        """Compare gradients of a few samples; whether that could be done, with whatever result."""
        n = min(_MOST_SAMPLES, self._subject.n_samples)
        # fewer where memory is short; one sample alone has no parts
        sizes = [size for size in (n, n // 2, n // 4) if size > 1]
        # picked samples stand at other places, which a function of pairs does not survive
        could = first_that_fits(self._ends, sizes) or self.finding is not None
        return bool(could or first_that_fits(self._halves, sizes))

    def _ends(self, n: int) -> bool:
        """Choose samples at both ends of the batch's values, because counts may agree in one."""
        tree, n_samples = self._subject.tree, self._subject.n_samples
        sizes = dict.fromkeys((min(-(-n * 5 // 8), n - 1), max(n - 2, 1)))
        self._compare_parts(chosen_samples(tree, n_samples, n), sizes)
        if self.finding is None and not self.is_coupled and self._subject.spec.loss == "sum":
            self._compare_parts(spread_samples(tree, n_samples, n), [-(-n // 2)])
        return True

    def _halves(self, n: int) -> bool:
        """Choose the first samples: a function may want pairs, or as many of each kind."""
        return self._compare_parts(list(range(n - n % 2)), [n // 2])

    def _compare_parts(self, indices: list[int], sizes: Iterable[int]) -> bool:
        self.finding, subject, n = None, self._subject, len(indices)
        whole = subject.observe(indices, n, looks=True)
        for size in sizes:
            split = whole and subject.observe(indices, size)
            # statistics of each micro-batch were asked for, so a difference is what the user wants
            if whole is None or split is None:
                self.is_coupled = True
                break
            # of a function that tells more than its loss, such as what a trainer logs
            if on_compared := getattr(subject.spec.fn, "on_compared", None):
                on_compared(whole.outcome, split.outcome)
            self._scale = 0.0
            if not self._agree(
                whole, split, GRADIENTS, lambda rough: subject.observe(indices, n, rough=rough)
            ):
                break
            self._scale = float(whole.outcome.loss.detach().abs().nan_to_num())
        return True

    def losses(self, outcome: StepOutcome, most: int) -> bool:
        """Compare the loss of the whole batch; whether that could be done.

        Args:
            outcome: what its micro-batches gave.
            most: how many samples may be run.
        """
        n, size = self._subject.n_samples, max(outcome.sizes)
        # halves of the batch where the whole does not fit, down to one more than a micro-batch
        numbers = [n]
        while n > size:
            n = max(n // 2, size + 1) if n > size + 1 else 0
            numbers += [n] if n > size else []
        work = functools.partial(self._compare_losses, outcome)
        fitting = [number for number in numbers if number <= most]
        return bool(first_that_fits(work, fitting) or self.finding is not None)

    def _compare_losses(self, outcome: StepOutcome, n: int) -> bool:
        self.finding, subject = None, self._subject
        # the micro-batches, as far as there are samples
        ends = [min(end, n) for end in accumulate(outcome.sizes)]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start]
        whole = self._values(n, [n])
        if whole is None:
            return False
        # nothing needs to run again where the same samples gave the same numbers; outputs are added
        # up by another loss here, and once() is no part of what is compared
        is_other = callable(subject.spec.loss) or subject.spec.once is not None
        if subject.is_random or is_other or subject.without_statistics or n < subject.n_samples:
            split = self._values(n, sizes)
        else:
            split = Observed(outcome)
        assert split is not None
        self._agree(whole, split, LOSSES, lambda rough: self._values(n, [n], rough))
        return True

    def _values(
        self, n: int, sizes: Sequence[int], rough: RoughRounding | None = None
    ) -> Observed | None:
        """Return the values of the first samples; None if statistics can't be left out."""
        subject = self._subject
        parts = subject.parts_of(None if n == subject.n_samples else range(n))
        with subject.comparable(parts, rough=rough):
            if subject.without_statistics and coupled_modules(parts.roots):
                return None
            return Observed(split_values(parts, sizes))

    def _agree(self, whole: Observed, split: Observed, tolerance: Tolerance, again: _Run) -> bool:
        """Return whether nothing differs but by rounding, or by unseen random numbers."""
        names, scale = self._subject.names, self._scale

        @functools.cache
        def noise(roughness: int, draw: int) -> dict[str, float]:
            run = again(RoughRounding(roughness, draw) if roughness else None)
            assert run is not None
            found = differences(whole, run, 0.0, names, scale)
            return {each.name: each.relative_error for each in found}

        def is_explained(each: SplitDifference) -> bool:
            return is_noise(each.relative_error, lambda n, draw: noise(n, draw).get(each.name, 0.0))

        with without_functions():
            rtol = tolerance.of(whole.tensors(), self._subject.types)
            found = differences(whole, split, rtol, names, scale)
        if found:
            # it stays a finding although the runs that explain it fail
            self.finding = worst(found, whole, split)
            if all(map(is_explained, found)):
                self.finding = None
        return self.finding is None


def exchanged(subject: Subject) -> tuple[bool, CheckFinding | None]:
    """Exchange samples; whether that could be done, and what is no sum over samples."""
    # each run starts from one random state, also if the last one drew nothing
    subject.is_random = True
    n = min(_MOST_SAMPLES, subject.n_samples)
    sizes = [size for size in (n, n // 2) if size > 1]
    found = first_that_fits(lambda size: [_under_some_states(subject, size)], sizes)
    return (False, None) if found is None else (True, found[0])


def _under_some_states(subject: Subject, n: int) -> CheckFinding | None:
    """Exchange under a few random states: in one of them samples may mix by next to nothing."""
    rng = subject.parts_of(range(n)).state.rng
    rng.begin()
    try:
        for _ in range(_N_STATES):
            if found := _exchange(subject, n):
                return found
        return None
    finally:
        rng.undo()


def _exchange(subject: Subject, n: int) -> CheckFinding | None:
    """Exchange under one random state, and go on to the one that a run has left behind."""
    here = spread_samples(subject.tree, subject.n_samples, n)
    others = [i for i in range(subject.n_samples) if i not in here]
    # a small batch is exchanged with itself, in another order
    there = others[:n] if len(others) >= n else [*here[n // 2 :], *here[: n // 2]]
    values = []
    for first, second in ((here, here), (here, there), (there, here), (there, there)):
        parts = subject.parts_of([(first if i % 2 else second)[i] for i in range(n)])
        with subject.comparable(parts):
            sums, drawn = _sums(parts)
        values.append(sums)
    drawn.undo()
    for name in values[0]:
        a, b, c, d = (float(each[name]) for each in values)
        error = abs(a - b - c + d) / (max(map(abs, (a, b, c, d))) or 1.0)
        if error > EXCHANGED_RTOL:
            return CheckFinding(
                f"{told_of(name)}, summed up with half of its samples exchanged for others,",
                d, b + c - a, error, (n // 2, n - n // 2),
            )  # fmt: skip
    return None


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


def split_values(parts: StepParts, sizes: Sequence[int]) -> StepOutcome:
    """Return the loss of samples in parts of these lengths, and its terms."""
    with unseen(parts):
        spec = parts.spec
        chunks = [Chunk(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
        if callable(spec.loss):
            outputs = [
                Outputs(
                    parts.call(parts.inputs.chunk(*chunk)), spec.out_dims, chunk.length
                ).detached()
                for chunk in chunks
            ]
            joined = JoinedOutputs(outputs)
            return StepOutcome(copied(joined.loss_by(spec.loss)), {}, tuple(sizes))
        split = ChunkTerms(parts, chunks)
        each = [split.of(i).detached() for i in range(len(chunks))]
        terms = combined([one.by_name for one in each], split.shares, split.reduction)
        loss = copied(finished_loss(terms, each[0].named, spec.then))
        return StepOutcome(loss, terms, tuple(sizes))


def _sums(parts: StepParts) -> tuple[dict[str, Tensor], RngState]:
    """Return the parts of terms that are sums, if declared rightly, and the state after it."""
    with unseen(parts):
        spec, inputs = parts.spec, parts.inputs
        returned = parts.call(inputs.whole())
        drawn = parts.state.random_now()
        if callable(spec.loss):
            return {ONLY: spec.loss(returned)}, drawn
        weight: Any = parts.n_samples if spec.weight is None else spec.weight(inputs.whole())
        found: dict[str, Tensor] = {}
        for name, term in terms_of(returned, spec.loss).by_name.items():
            if term.count is not None:
                found[f"{name}: count"] = torch.as_tensor(widened_count(term.count))
            is_sum = term.count is not None or spec.loss == "sum"
            found[name] = widened(term.value) * (1 if is_sum else weight)
        sums = {name: torch.nan_to_num(value.double().cpu()) for name, value in found.items()}
        return sums, drawn
