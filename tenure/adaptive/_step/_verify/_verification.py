"""The verification of one call of `step`, between its micro-batches and the delivery."""

from __future__ import annotations

from typing import Any, NoReturn

from tenure._errors import AdaptiveUsageWarning, SplitMismatchError
from tenure._warn import warn_user

from .._run import StepOutcome
from .._sample_tree import SampleDims
from .._setup import StepSetup
from .._spec import StepSpec
from ._advice import advice_for
from ._exchange import ExchangeCheck
from ._finding import Finding
from ._gradients import GradientCheck
from ._places import Visit
from ._subject import Subject
from ._whole import WholeCheck


class Verification:
    """Refuses a split that differs from the whole, where it is time to look.

    Args:
        setup: the step.
        spec: what it does.
        batch: its batch.
        in_dims: where that has its samples.
        model: as the user passed it.
    """

    def __init__(
        self, setup: StepSetup, spec: StepSpec, batch: Any, in_dims: SampleDims, model: Any
    ) -> None:
        self._setup = setup
        self._spec = spec
        self._batch = batch
        self._in_dims = in_dims
        self._model = model
        self._is_done = False

    def __call__(self, outcome: StepOutcome) -> None:
        """Look, if it is time.

        Args:
            outcome: what the micro-batches gave.

        Raises:
            SplitMismatchError: it is not what the whole gives.
        """
        if self._is_done or self._setup.n_samples < 2 or outcome.loss.is_meta:
            return
        self._is_done = True  # another attempt of this call splits in another way, and is as right
        subject = Subject(self._spec, self._batch, self._in_dims, self._model)
        visit = Visit(self._spec, self._setup, subject.tree.leaves)
        if visit.is_due:
            visit.verified(self._verify(subject, outcome, is_first=visit.is_first))

    def _verify(self, subject: Subject, outcome: StepOutcome, *, is_first: bool) -> int:
        """Compare; the number of samples that it took."""
        is_random = self._setup.rng.has_drawn()
        gradients = GradientCheck(subject, is_random=is_random)
        could = gradients.run()
        n_run, found = gradients.n_run, gradients.finding
        unlike = gradients.has_unknown or self._setup.rng.has_drawn(elsewhere=True)
        if found is not None and unlike:
            exchange = ExchangeCheck(subject)
            could = exchange.run()
            n_run, found = n_run + exchange.n_run, exchange.finding
        elif found is None and not (gradients.is_coupled or self._setup.run.inputs.is_written):
            n = subject.n_samples
            whole = WholeCheck(
                subject,
                outcome,
                is_random=is_random,
                scale=gradients.loss,
                most=n if is_first or not is_random else n // 2,
            )
            could = whole.run() or could
            n_run, found = n_run + whole.n_run, whole.finding
        if found is not None:
            self._refuse(subject, found, outcome, is_random)
        if not could:
            self._warn()
        return n_run

    def _refuse(
        self, subject: Subject, found: Finding, outcome: StepOutcome, is_random: bool
    ) -> NoReturn:
        advice = advice_for(subject, self._setup, self._spec, is_random=is_random)
        raise SplitMismatchError(
            f"The batch of {subject.n_samples} has to be split into micro-batches of "
            f"{max(outcome.sizes)}, and {self._setup.name!r} would give other results then: "
            f"{found}. Nothing was changed. {advice}",
            found.whole,
            found.split,
            advice,
        )

    def _warn(self) -> None:
        warn_user(
            f"step() split a batch of {self._setup.n_samples}, and could not verify that "
            f"{self._setup.name!r} gives the same in micro-batches: it ran neither on fewer "
            "samples nor on more. Ask check_split() where there is memory, and pass verify=False.",
            AdaptiveUsageWarning,
        )
