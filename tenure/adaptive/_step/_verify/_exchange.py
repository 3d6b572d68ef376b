"""Functions whose random numbers can't be made the same for parts: do their samples mix?

Under one random state, samples are exchanged in two groups that lie mixed by position. What is a
sum over samples changes by the same for one group whatever the other holds:
f(a, b) - f(a', b) - f(a, b') + f(a', b') is zero.
"""

from __future__ import annotations

from .._check import EXCHANGED_RTOL
from .._loss import ONLY
from ._finding import Finding
from ._fitting import first_that_fits
from ._samples import chosen_samples
from ._subject import Subject, comparable, set_back
from ._values import Values, sums

_MOST_SAMPLES = 8
_N_STATES = 3


class ExchangeCheck:
    """Exchanges samples.

    Args:
        subject: the step.

    Attributes:
        finding: what is no sum over samples.
        n_run: the samples that were run.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.finding: Finding | None = None
        self.n_run = 0

    def run(self) -> bool:
        """Compare; whether that could be done, with whatever result."""
        n = min(_MOST_SAMPLES, self._subject.n_samples)
        return bool(first_that_fits(self._compare, [size for size in (n, n // 2) if size > 1]))

    def _compare(self, n: int) -> bool:
        """Under a few random states: in one of them samples may mix by next to nothing."""
        rng = self._subject.of(self._subject.taken(range(n))).rng
        rng.begin()
        try:
            for _ in range(_N_STATES):
                self._exchange(n)
                if self.finding is not None:
                    break
                rng.draw()
            return True
        finally:
            rng.undo()

    def _exchange(self, n: int) -> None:
        here = chosen_samples(self._subject.tree, self._subject.n_samples, n)
        others = [i for i in range(self._subject.n_samples) if i not in here]
        there = others[:n] if len(others) >= n else [*here[n // 2 :], *here[: n // 2]]
        groups = range(n)
        batches = [
            [(there if (first if i % 2 else second) else here)[i] for i in groups]
            for first in (False, True)
            for second in (False, True)
        ]
        values = [self._sums(batch) for batch in batches]
        for name in values[0]:
            a, b, c, d = (float(each[name]) for each in values)
            largest = max(map(abs, (a, b, c, d)))
            if abs(a - b - c + d) > EXCHANGED_RTOL * largest:
                what = "the loss" if name == ONLY else f"the term {name!r}"
                error = abs(a - b - c + d) / largest
                self.finding = Finding(
                    f"{what}, summed up with half of its samples exchanged for others,",
                    d, b + c - a, error, (n // 2, n - n // 2),
                )  # fmt: skip
                return

    def _sums(self, indices: list[int]) -> Values:
        setup = self._subject.of(self._subject.taken(indices))
        self.n_run += len(indices)
        with comparable(setup, is_random=False), set_back(setup):
            return sums(setup)
