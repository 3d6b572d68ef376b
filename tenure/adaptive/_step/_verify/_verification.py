"""The verification of one call of `step`: gradients before it runs, losses before it delivers."""

from __future__ import annotations

from torch import Tensor

from tenure._callers import warn_user
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning, SplitMismatchError
from tenure._torch.compiler import draws_again_in_backward, not_compiling

from .._split import StepOutcome, StepParts
from ._count_check import DO_NOT_CLAMP, checked_count, lowest_counts
from ._declarations import advice_for
from ._finding import CheckFinding
from ._gradient_check import GradientCheck
from ._loss_check import LossCheck, exchanged
from ._subject import Subject
from ._when import SplitCall

_EVER_NEW = (
    "step() verifies nearly every split, for what its function holds is another each time: a new "
    "model or function, or a text that changes. That is right, and takes time. Let the function "
    "hold the same objects in each call; or ask check_split() once, and pass verify=False."
)


class Verification:
    """Refuses a split that differs from the whole, where it is time to look.

    Args:
        parts: the step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._visit: SplitCall | None = None
        # of a call that is due, until it is delivered
        self._subject: Subject | None = None
        self._could_compare = self._wants_whole = False
        self._loss = 0.0

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
        visit = self._visit = SplitCall(self._parts)
        # programs of lazy() are ever new, and their user can do nothing about it
        if visit.is_ever_new and self._parts.spec.entry != "lazy":
            warn_user(_EVER_NEW, AdaptiveUsageWarning)
        if visit.is_due:
            self._subject = Subject(self._parts)
            # a graph for each of its sizes and modes would cost minutes
            with not_compiling():
                self._look(self._subject, size)

    def before_delivery(self, outcome: StepOutcome) -> None:
        """Compare the loss of the whole batch, if it is time, before gradients are delivered.

        Args:
            outcome: what the micro-batches gave.

        Raises:
            SplitMismatchError: it is not what the whole gives.
            AdaptiveUsageError: ``backward=`` has scaled the micro-batches differently.
        """
        visit, parts, size = self._visit, self._parts, max(outcome.sizes)
        subject, self._subject = self._subject, None
        if visit is not None and parts.spec.entry != "lazy":
            self._check_counts(visit, size)
        if visit is None or subject is None:
            return
        parts.backward.check_linear()
        # a batch that the micro-batches have written into is no longer the one they ran on
        if self._wants_whole and not parts.inputs.is_written:
            n = subject.n_samples
            most = n if visit.is_first or not subject.is_random else n // 2
            losses = LossCheck(subject, outcome, scale=self._loss, most=most)
            with not_compiling():
                self._could_compare |= losses.compare()
                self._refuse(losses.finding, subject, size)
        # what was wrong once may be wrong again, and nothing tells that it is not
        if not self._could_compare and visit.refusal is not None:
            raise visit.refusal
        # what lazy() splits by is no claim of the user's, who could do nothing about it
        if not self._could_compare and parts.spec.entry == "step":
            self._warn()
        visit.note_verified(subject.n_run)

    def _look(self, subject: Subject, size: int) -> None:
        gradients = GradientCheck(subject)
        self._could_compare = gradients.compare()
        subject.forget()
        if subject.refused is not None:
            raise subject.refused.with_traceback(None)
        if subject.is_random and self._parts.compiled and draws_again_in_backward():
            raise _drawn_again_error(self._parts.name)
        finding, self._loss = gradients.finding, gradients.loss
        self._wants_whole = not gradients.is_coupled
        # other numbers for the parts than for the whole explain any difference
        if finding is not None and (gradients.has_unknown or subject.draws_elsewhere):
            self._wants_whole = False
            self._could_compare, finding = exchanged(subject)
        self._refuse(finding, subject, size)

    def _check_counts(self, visit: SplitCall, size: int) -> None:
        """Look at counts in each call, because a clamped one is wrong only where it is low."""
        for lowest in filter(visit.wants_count, lowest_counts(self._parts.divisors)):
            if self._parts.inputs.is_written:
                return
            subject = Subject(self._parts)
            with not_compiling():
                known, finding = checked_count(subject, lowest)
            self._refuse(finding, subject, size, DO_NOT_CLAMP)
            visit.note_count(lowest, known, subject.n_run)

    def _refuse(
        self, found: CheckFinding | None, subject: Subject, size: int, advice: str | None = None
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
