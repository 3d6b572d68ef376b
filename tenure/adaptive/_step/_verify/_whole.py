"""One forward pass of the whole batch without graphs, against the micro-batches that just ran.

Only it sees what a few samples don't show: a fixed number of hard examples kept of all, one sample
of many that is masked, an outlier.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from .._check import LOSSES, is_noise
from .._loss import ONLY
from .._modules import coupled_modules
from .._split import StepOutcome
from ._finding import Finding, farthest
from ._fitting import first_that_fits
from ._rounding import RoughRounding
from ._subject import Subject, comparable
from ._values import Values, split_values, whole_values


class WholeCheck:
    """Compares the losses.

    Args:
        subject: the step.
        outcome: what its micro-batches gave.
        is_random: whether it draws random numbers, so that the micro-batches have to run again.
        scale: the loss of a few samples; what is much smaller than that counts as nothing.
        most: how many samples may be run.

    Attributes:
        finding: what differs.
        n_run: the samples that were run.
    """

    def __init__(
        self,
        subject: Subject,
        outcome: StepOutcome,
        *,
        is_random: bool,
        scale: float,
        most: int,
    ) -> None:
        self._subject = subject
        self._outcome = outcome
        self._is_random = is_random
        self._scale = scale
        self._most = most
        self.finding: Finding | None = None
        self.n_run = 0

    def run(self) -> bool:
        """Compare them; whether that could be done, with whatever result."""
        n, size = self._subject.n_samples, max(self._outcome.sizes)
        sizes = [n] if self._most >= n else []
        while n > size:
            n = max(n // 2, size + 1) if n > size + 1 else 0
            if size < n <= self._most:
                sizes.append(n)
        return bool(first_that_fits(self._compare, sizes) or self.finding is not None)

    def _compare(self, n_samples: int) -> bool:
        self.finding = None
        sizes = self._sizes(n_samples)
        whole = self._values(n_samples, None)
        if whole is None:
            return False
        split = self._known(n_samples) or self._values(n_samples, sizes)
        assert split is not None
        rtol = LOSSES.of([*whole.values(), *self._outcome.terms.values()])
        for name, value in whole.items():
            error = self._error(value, split[name])
            if not error <= rtol:
                what = "the loss" if name == ONLY else f"the term {name!r}"
                # also if there is no room for more
                self.finding = Finding(what, *farthest(value, split[name]), error, sizes)
                if not self._is_explained(name, value, error, n_samples):
                    return True
                self.finding = None
        return True

    def _sizes(self, n_samples: int) -> Sequence[int]:
        """The lengths of the parts of the first samples."""
        left, sizes = n_samples, []
        for size in self._outcome.sizes:
            if left > 0:
                sizes.append(min(size, left))
                left -= size
        return sizes

    def _known(self, n_samples: int) -> Values | None:
        """What the micro-batches gave, unless they drew random numbers."""
        spec = self._subject.spec
        if self._is_random or callable(spec.loss) or n_samples < self._subject.n_samples:
            return None
        if spec.batchnorm == "per_chunk" or spec.once is not None:
            return None
        return {**self._outcome.terms, ONLY: self._outcome.loss}

    def _values(
        self, n_samples: int, sizes: Sequence[int] | None, *, rough: RoughRounding | None = None
    ) -> Values | None:
        """Those of the whole, or of parts; None where statistics can't be turned off."""
        is_whole = n_samples == self._subject.n_samples
        part = self._subject.taken(None if is_whole else range(n_samples))
        setup = self._subject.of(part)
        self.n_run += n_samples
        with comparable(setup, is_random=self._is_random, rough=rough):
            if setup.run.spec.batchnorm == "per_chunk" and coupled_modules(setup.roots):
                return None
            if sizes is not None:
                return split_values(setup, sizes)
            return whole_values(setup)

    def _error(self, whole: Tensor, split: Tensor) -> float:
        a, b = float(whole), float(split)
        if a == b or (a != a and b != b):
            return 0.0
        return abs(a - b) / max(abs(a), abs(b), self._scale)

    def _is_explained(self, name: str, value: Tensor, error: float, n_samples: int) -> bool:
        """Whether rounding, or what the function draws unseen, makes such a difference too."""

        @functools.cache
        def noise(roughness: int, draw: int) -> float:
            rough = RoughRounding(roughness, draw) if roughness else None
            again = self._values(n_samples, None, rough=rough)
            assert again is not None
            return self._error(value, again[name])

        return is_noise(error, noise)
