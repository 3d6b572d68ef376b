"""The verification of one call of `step`: gradients before it runs, losses before it delivers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tenure._callers import warn_user
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning, SplitMismatchError
from tenure._torch.compiler import draws_again_in_backward, not_compiling

from .._split import StepOutcome, StepParts
from ._count_check import DO_NOT_CLAMP, CountCheck, lowest_counts
from ._declarations import advice_for
from ._finding import Finding
from ._gradient_check import GradientCheck
from ._loss_check import ExchangeCheck, LossCheck
from ._subject import Subject
from ._when import Visit

_EVER_NEW = (
    "step() verifies nearly every split, for what its function holds is another each time: a new "
    "model or function, or a text that changes. That is right, and takes time. Let the function "
    "hold the same objects in each call; or ask check_split() once, and pass verify=False."
)


class _Looked(NamedTuple):
    """What the gradients showed.

    Attributes:
        subject: the step.
        visit: the call.
        could_compare: whether that could be done, with whatever result.
        n_run: the samples that were run.
        loss: the loss of a few samples.
        wants_whole: whether the loss of the whole batch tells more.
    """

    subject: Subject
    visit: Visit
    could_compare: bool
    n_run: int
    loss: float
    wants_whole: bool


class Verification:
    """Refuses a split that differs from the whole, where it is time to look.

    Args:
        parts: the step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._visit: Visit | None = None
        self._looked: _Looked | None = None

    def before_split(self, size: int) -> None:
        """Compare gradients of a few samples, if it is time; before anything else takes memory.

        Args:
            size: the samples of a micro-batch that is tried.

        Raises:
            SplitMismatchError: the micro-batches don't give what the whole gives.
        """
        # another attempt of this call splits in another way, as right
        if self._visit is not None or not 1 < self._parts.n_samples > size:
            return
        # without numbers there is nothing to compare
        if any(isinstance(v, Tensor) and v.is_meta for v in self._parts.values):
            return
        # one that runs out of memory may, but then no other pass could follow
        if self._parts.exchange.is_sharded:
            return
        visit = self._visit = Visit(self._parts)
        # programs of lazy() are ever new, and their user can do nothing about it
        if visit.is_ever_new and self._parts.spec.entry != "lazy":
            warn_user(_EVER_NEW, AdaptiveUsageWarning)
        if visit.is_due:
            subject = Subject(self._parts)
            # a graph for each of its sizes and modes would cost minutes
            with not_compiling():
                self._looked = self._look(subject, visit, size)

    def before_delivery(self, outcome: StepOutcome) -> None:
        """Compare the loss of the whole batch, if it is time, before gradients are delivered.

        Args:
            outcome: what the micro-batches gave.

        Raises:
            SplitMismatchError: it is not what the whole gives.
            AdaptiveUsageError: ``backward=`` has scaled the micro-batches differently.
        """
        looked, self._looked = self._looked, None
        self._check_counts(None if looked is None else looked.subject, max(outcome.sizes))
        if looked is None:
            return
        self._parts.backward.check_linear()
        could_compare, n_run = looked.could_compare, looked.n_run
        # a batch that the micro-batches have written into is no longer the one they ran on
        if looked.wants_whole and not self._parts.inputs.is_written:
            n = looked.subject.n_samples
            may_run_all = looked.visit.is_first or not looked.subject.is_random
            losses = LossCheck(
                looked.subject, outcome, scale=looked.loss, most=n if may_run_all else n // 2
            )
            with not_compiling():
                could_compare = losses.compare() or could_compare
                self._refuse(losses.finding, looked.subject, max(outcome.sizes))
            n_run += losses.n_run
        # what was wrong once may be wrong again, and nothing tells that it is not
        if not could_compare and looked.visit.refusal is not None:
            raise looked.visit.refusal
        # what lazy() splits by is no claim of the user's, who could do nothing about it
        if not could_compare and self._parts.spec.entry == "step":
            self._warn()
        looked.visit.note_verified(n_run)

    def _look(self, subject: Subject, visit: Visit, size: int) -> _Looked:
        gradients = GradientCheck(subject)
        could_compare, n_run = gradients.compare(), gradients.n_run
        subject.forget()
        if subject.refused is not None:
            raise subject.refused.with_traceback(None)
        if subject.is_random and self._parts.compiled and draws_again_in_backward():
            raise _drawn_again_error(self._parts.name)
        if gradients.finding is None or not (gradients.has_unknown or subject.draws_elsewhere):
            self._refuse(gradients.finding, subject, size)
            wants_whole = not gradients.is_coupled
            return _Looked(subject, visit, could_compare, n_run, gradients.loss, wants_whole)
        # other numbers for the parts than for the whole explain any difference
        exchange = ExchangeCheck(subject)
        could_compare = exchange.compare()
        self._refuse(exchange.finding, subject, size)
        n_run += exchange.n_run
        return _Looked(subject, visit, could_compare, n_run, gradients.loss, wants_whole=False)

    def _check_counts(self, subject: Subject | None, size: int) -> None:
        """Look at counts in each call, because a clamped one is wrong only where it is low."""
        visit, parts = self._visit, self._parts
        if visit is None or not parts.divisors or parts.spec.entry == "lazy":
            return
        for lowest in filter(visit.wants_count, lowest_counts(parts.divisors)):
            if subject is None:
                subject = Subject(parts)
            if parts.inputs.is_written:
                return
            check = CountCheck(subject)
            with not_compiling():
                known = check.compare(lowest)
            self._refuse(check.finding, subject, size, DO_NOT_CLAMP)
            visit.note_count(lowest, known, check.n_run)

    def _refuse(
        self, found: Finding | None, subject: Subject, size: int, advice: str | None = None
    ) -> None:
        if found is None:
            return
        advice = advice_for(subject, self._parts) if advice is None else advice
        error = (
            f"The batch of {subject.n_samples} has to be split into micro-batches of {size}, and "
            f"{self._parts.name!r} would give other results then: {found}. Nothing was changed. "
            f"{advice}",
            found.whole,
            found.split,
            advice,
        )
        assert self._visit is not None
        self._visit.note_refused(*error)
        raise SplitMismatchError(*error)

    def _warn(self) -> None:
        warn_user(
            f"step() split a batch of {self._parts.n_samples}, and could not verify that "
            f"{self._parts.name!r} gives the same in micro-batches: it ran neither on fewer "
            "samples nor on more. Ask check_split() where there is memory, and pass verify=False.",
            AdaptiveUsageWarning,
        )


def _drawn_again_error(name: str) -> AdaptiveUsageError:
    return AdaptiveUsageError(
        f"{name!r} draws random numbers in compiled code, and torch._functorch.config."
        "activation_memory_budget is below 1: torch may then draw others in the backward pass, "
        "which gives wrong gradients, of the whole batch as well. Set it to 1, and save "
        "activations with torch.utils.checkpoint; where your torch draws the same numbers, pass "
        "verify=False."
    )
