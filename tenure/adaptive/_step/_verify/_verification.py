"""The verification of one call of `step`: gradients before it runs, losses before it delivers."""

from __future__ import annotations

from torch import Tensor

from tenure._callers import warn_user
from tenure._errors import AdaptiveUsageError, AdaptiveUsageWarning, SplitMismatchError
from tenure._torch.compiler import draws_again_in_backward, not_compiling
from tenure._torch.quiet import without_functions

from .._parts import StepParts
from .._split import StepOutcome
from ._compare import CheckFinding
from ._comparison import SplitComparison, exchanged
from ._count_check import DO_NOT_CLAMP, checked_count, lowest_counts
from ._declarations import advice_for
from ._subject import Subject
from ._when import SplitCall


class Verification:
    """Refuses a split that differs from the whole, where it is time to look.

    Args:
        parts: the step.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._visit: SplitCall | None = None
        # of a call that is due, until it is delivered
        self._due: tuple[Subject, SplitComparison] | None = None
        self._could_compare = self._wants_whole = False

    def before_split(self, size: int) -> None:
        """Compare gradients of a few samples, if it is time; before anything else takes memory.

        Args:
            size: the samples of a micro-batch that is tried.

        Raises:
            SplitMismatchError: the micro-batches don't give what the whole gives.
        """
        parts = self._parts
        # another attempt of this call splits in another way, as right
        if self._visit is not None or not 1 < parts.n_samples > size:
            return
        # without numbers there is nothing to compare; and a run of sharded modules may run out of
        # memory, but then no other pass could follow
        with without_functions():
            has_none = any(isinstance(value, Tensor) and value.is_meta for value in parts.values)
        if has_none or parts.exchange.is_sharded:
            return
        self._visit = SplitCall(parts)
        if self._visit.is_due:
            subject = Subject(parts)
            self._due = subject, SplitComparison(subject)
            # a graph for each of its sizes and modes would cost minutes
            with not_compiling():
                self._look(*self._due, size)

    def before_delivery(self, outcome: StepOutcome) -> None:
        """Compare the loss of the whole batch, if it is time, before gradients are delivered.

        Args:
            outcome: what the micro-batches gave.

        Raises:
            SplitMismatchError: it is not what the whole gives.
            AdaptiveUsageError: ``backward=`` has scaled the micro-batches differently.
        """
        visit, parts, size = self._visit, self._parts, max(outcome.sizes)
        due, self._due = self._due, None
        if visit is not None and parts.spec.entry != "lazy":
            self._check_counts(visit, size)
        if visit is None or due is None:
            return
        subject, comparison = due
        parts.backward.check_linear()
        # a batch that the micro-batches have written into is no longer the one they ran on
        if self._wants_whole and not parts.inputs.is_written:
            n = subject.n_samples
            most = n if visit.is_first or not subject.is_random else n // 2
            with not_compiling():
                self._could_compare |= comparison.losses(outcome, most)
                self._refuse(comparison.finding, subject, size)
        # what was wrong once may be wrong again, and nothing tells that it is not
        if not self._could_compare and visit.place.refusal is not None:
            raise SplitMismatchError(*visit.place.refusal)
        # what lazy() splits by is no claim of the user's, who could do nothing about it
        if not self._could_compare and parts.spec.entry == "step":
            self._warn()
        visit.note_verified(subject.n_run)

    def _look(self, subject: Subject, comparison: SplitComparison, size: int) -> None:
        self._could_compare = comparison.samples()
        subject.forget()
        if subject.refused is not None:
            raise subject.refused.with_traceback(None)
        if subject.is_random and self._parts.compiled and draws_again_in_backward():
            raise _drawn_again_error(self._parts.name)
        finding = comparison.finding
        self._wants_whole = not comparison.is_coupled
        # other numbers for the parts than for the whole explain any difference
        if finding is not None and subject.has_others:
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
        assert self._visit is not None
        advice = advice_for(subject, self._parts) if advice is None else advice
        self._visit.place.refusal = (
            f"The batch of {subject.n_samples} has to be split into micro-batches of {size}, and "
            f"{self._parts.name!r} would give other results then: {found}. Nothing was changed. "
            f"{advice}",
            found.whole,
            found.split,
            advice,
        )
        raise SplitMismatchError(*self._visit.place.refusal)

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
