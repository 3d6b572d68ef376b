"""Gradients of a few samples, whole and in two parts.

Values alone do not do: a loss may be zero either way, as in the first epoch of PPO, and its
gradient be off by a third.
"""

from __future__ import annotations

import functools

import torch

from tenure._torch.quiet import without_functions

from .._modules import coupled_modules
from .._split import StepParts
from ._compare import GRADIENTS, SplitDifference, is_noise
from ._finding import CheckFinding, worst
from ._modes import RoughRounding
from ._observed import LeafNames, Observed, buffers_of, differences, observed_run
from ._subject import Subject, chosen_samples, comparable, first_that_fits, spread_samples

_MOST_SAMPLES = 8


class GradientCheck:
    """Compares the gradients.

    Args:
        subject: the step.

    Attributes:
        finding: what differs.
        is_coupled: whether modules mix samples, as was allowed, and can't be kept from it.
        has_unknown: whether numbers were drawn that differ for parts.
        loss: the size of the loss of the samples.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.finding: CheckFinding | None = None
        self.is_coupled = False
        self.has_unknown = False
        # shared by all runs: what the function makes anew in each has no other name
        self._names: LeafNames = {}
        self.loss = 0.0

    def compare(self) -> bool:
        """Compare them; whether that could be done, with whatever result."""
        n = min(_MOST_SAMPLES, self._subject.n_samples)
        # fewer where memory is short; one sample alone has no parts
        sizes = [size for size in (n, n // 2, n // 4) if size > 1]
        # picked samples stand at other places, which a function of pairs does not survive: see
        # test_a_function_that_runs_on_pairs_alone_is_compared_in_halves
        could = first_that_fits(self._ends, sizes) or self.finding is not None
        return bool(could or first_that_fits(self._halves, sizes))

    def _ends(self, n: int) -> bool:
        """Choose samples at both ends of the batch's values, because counts may agree in one."""
        indices = chosen_samples(self._subject.tree, self._subject.n_samples, n)
        sizes = dict.fromkeys((min(-(-n * 5 // 8), n - 1), max(n - 2, 1)))
        self._compare_parts(indices, list(sizes))
        if self.finding is None and not self.is_coupled and self._subject.spec.loss == "sum":
            indices = spread_samples(self._subject.tree, self._subject.n_samples, n)
            self._compare_parts(indices, [-(-n // 2)])
        return True

    def _halves(self, n: int) -> bool:
        """Return the first samples: a function may want pairs, or as many of each kind."""
        return self._compare_parts(list(range(n - n % 2)), [n // 2])

    def _compare_parts(self, indices: list[int], sizes: list[int]) -> bool:
        self.finding, subject = None, self._subject
        whole = self._run_of(indices, len(indices), looks=True)
        for size in sizes:
            split = None if whole is None else self._run_of(indices, size)
            # statistics of each micro-batch were asked for, so a difference is what the user wants
            if whole is None or split is None:
                self.is_coupled = True
                return True
            # of a function that tells more than its loss, such as what a trainer logs
            if on_compared := getattr(subject.spec.fn, "on_compared", None):
                on_compared(whole.outcome, split.outcome)
            with without_functions():
                self.loss = float(whole.outcome.loss.detach().abs().nan_to_num())
                rtol = GRADIENTS.of(whole.tensors(), subject.types)
                found = differences(whole, split, rtol, self._names)
            if found:
                # it stays a finding although the runs that explain it fail
                self.finding = worst(found, whole, split)
                if not self._is_explained(found, indices, whole):
                    break
                self.finding = None
        return True

    def _is_explained(
        self, found: list[SplitDifference], indices: list[int], whole: Observed
    ) -> bool:
        """Return whether rounding or unseen random numbers make such a difference too."""
        names = self._names

        @functools.cache
        def again(roughness: int, draw: int) -> dict[str, float]:
            rough = RoughRounding(roughness, draw) if roughness else None
            run = self._run_of(indices, len(indices), rough=rough)
            assert run is not None
            return {each.name: each.relative_error for each in differences(whole, run, 0.0, names)}

        def is_explained(each: SplitDifference) -> bool:
            return is_noise(each.relative_error, lambda n, draw: again(n, draw).get(each.name, 0.0))

        return all(map(is_explained, found))

    def _run_of(
        self,
        indices: list[int],
        size: int,
        *,
        looks: bool = False,
        rough: RoughRounding | None = None,
    ) -> Observed | None:
        """Run once; return None if statistics were asked for and can't be off.

        Args:
            indices: the samples.
            size: how many of them in a part.
            looks: see what numbers are drawn, what types operations round to, and what is written.
            rough: how much worse each operation rounds.
        """
        subject = self._subject
        parts = subject.parts_of(indices)
        types = subject.types if looks else None
        with comparable(parts, is_random=subject.is_random, rough=rough, types=types) as numbers:
            per_chunk = parts.spec.batchnorm == "per_chunk"
            if per_chunk and coupled_modules(parts.roots):
                return None
            try:
                result = observed_run(
                    parts, size, watch=per_chunk, asks=looks, names=self._names
                )  # fmt: skip
            finally:
                subject.refused = subject.refused or parts.writes.error
        # an operation that may draw numbers, and has not: nothing is unknown
        self.has_unknown |= numbers.has_unknown and (not looks or result.draws[0])
        if looks:
            subject.is_random = numbers.has_drawn or result.draws[0]
            subject.draws_elsewhere = result.draws[1]
        subject.keep(indices, parts)
        return None if per_chunk and _writes(parts, result) else result


def _writes(parts: StepParts, result: Observed) -> bool:
    """Return whether a buffer is another after a run."""
    now = buffers_of(parts)
    return any(not torch.equal(now[name], buffer) for name, buffer in result.buffers.items())
