"""The verification of one call of `step`: gradients before it runs, losses before it delivers."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from tenure._callers import warn_user
from tenure._errors import AdaptiveUsageWarning, SplitMismatchError
from tenure._torch.compiler import not_compiling

from .._samples import SampleDims
from .._split import StepOutcome, StepSetup, StepSpec
from ._advice import advice_for
from ._exchange import ExchangeCheck
from ._finding import Finding
from ._gradients import GradientCheck
from ._places import Visit
from ._subject import Subject
from ._whole import WholeCheck


class _Looked(NamedTuple):
    """What the gradients showed.

    Attributes:
        subject: the step.
        visit: the call.
        could: whether they could be compared.
        n_run: the samples that were run.
        loss: the loss of a few samples.
        wants_whole: whether the loss of the whole batch tells more.
    """

    subject: Subject
    visit: Visit
    could: bool
    n_run: int
    loss: float
    wants_whole: bool


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
        self._in_dims: SampleDims = in_dims
        self._model = model
        self._looked: _Looked | None = None
        self._is_begun = False

    def begin(self, size: int) -> None:
        """Compare gradients of a few samples, if it is time; before anything else takes memory.

        Args:
            size: the samples of a micro-batch that is tried.

        Raises:
            SplitMismatchError: the micro-batches don't give what the whole gives.
        """
        if self._is_begun or not 1 < self._setup.n_samples > size:
            return
        self._is_begun = True  # another attempt of this call splits in another way, as right
        if any(isinstance(v, Tensor) and v.is_meta for v in self._setup.values):
            return
        visit = Visit(self._spec, self._setup, self._setup.leaves)
        if visit.is_due:
            subject = Subject(self._spec, self._batch, self._in_dims, self._model)
            with not_compiling():  # a graph for each of its sizes and modes would cost minutes
                self._looked = self._look(subject, visit, size)

    def __call__(self, outcome: StepOutcome) -> None:
        """Compare the loss of the whole batch, if it is time, before gradients are delivered.

        Args:
            outcome: what the micro-batches gave.

        Raises:
            SplitMismatchError: it is not what the whole gives.
        """
        looked, self._looked = self._looked, None
        if looked is None:
            return
        could, n_run = looked.could, looked.n_run
        if looked.wants_whole and not self._setup.run.inputs.is_written:
            n, is_random = looked.subject.n_samples, looked.subject.is_random
            whole = WholeCheck(
                looked.subject,
                outcome,
                is_random=is_random,
                scale=looked.loss,
                most=n if looked.visit.is_first or not is_random else n // 2,
            )
            with not_compiling():
                could = whole.run() or could
                self._refuse_if(whole.finding, looked.subject, max(outcome.sizes))
            n_run += whole.n_run
        if not could:
            self._warn()
        looked.visit.verified(n_run)

    def _look(self, subject: Subject, visit: Visit, size: int) -> _Looked:
        subject.see_random_numbers()
        gradients = GradientCheck(subject, is_random=subject.is_random)
        could = gradients.run()
        n_run, found = gradients.n_run, gradients.finding
        is_unlike = gradients.has_unknown or subject.draws_elsewhere
        if found is not None and is_unlike:
            exchange = ExchangeCheck(subject)
            could = exchange.run()
            n_run, found = n_run + exchange.n_run, exchange.finding
            self._refuse_if(found, subject, size)
            return _Looked(subject, visit, could, n_run, gradients.loss, wants_whole=False)
        self._refuse_if(found, subject, size)
        wants_whole = not gradients.is_coupled
        return _Looked(subject, visit, could, n_run, gradients.loss, wants_whole)

    def _refuse_if(self, found: Finding | None, subject: Subject, size: int) -> None:
        if found is not None:
            self._refuse(subject, found, size)

    def _refuse(self, subject: Subject, found: Finding, size: int) -> NoReturn:
        advice = advice_for(subject, self._setup, self._spec, is_random=subject.is_random)
        raise SplitMismatchError(
            f"The batch of {subject.n_samples} has to be split into micro-batches of {size}, and "
            f"{self._setup.name!r} would give other results then: {found}. Nothing was changed. "
            f"{advice}",
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
