"""The report of a prediction: how much, when, where and for what; if it fits; what lowers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from tenure._show import Amounts, Paragraph, Part, Report, facts_of, plain
from tenure._text import format_bytes, parse_bytes

from ._blocks import CATEGORIES, MemoryRecord, replay

_WORDS_OF_PHASES = {"forward": "the forward pass", "backward": "the backward pass"}
_ROUNDING = "allocator rounding"
_RESERVED = "reserved, not allocated"
_ALLOWANCE = "allowance for kernels"


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the work, and the peak that is predicted with it.

    Attributes:
        what: the change, in words.
        how: a line of Python that makes it, with the names that the work has for its modules.
        peak_bytes: the peak with it.
        saves_bytes: by how much that is lower; below 0 if it is higher.
        changes_numbers: whether the results are others, beyond the order of sums.
    """

    what: str
    how: str
    peak_bytes: int
    saves_bytes: int
    changes_numbers: bool = False

    def summary(self) -> str:
        """Return the change and its effect, without the line that makes it."""
        effect = "would not lower the peak"
        if self.saves_bytes > 0:
            effect = f"saves {format_bytes(self.saves_bytes)}"
        others = "; gives other numbers" if self.changes_numbers else ""
        return f"{self.what}: {effect}{others}"

    def __str__(self) -> str:
        return f"{self.summary()}\n    {self.how}"


class Adviser:
    """Holds what asks for advice until that is wanted, and then the advice alone.

    Args:
        found: the advice so far.
        ask: finds the advice; None where nothing can be said any more.
    """

    def __init__(
        self,
        found: tuple[Advice, ...] = (),
        ask: Callable[[], tuple[Advice, ...]] | None = None,
    ) -> None:
        self.found, self._ask = found, ask

    def advice(self) -> tuple[Advice, ...]:
        """Return changes that lower the peak, the most effective first."""
        if self._ask is not None:
            self.found = tuple(sorted(self._ask(), key=lambda each: -each.saves_bytes))
            self._ask = None
        return self.found

    def __reduce__(self) -> Any:
        # copies and pickles hold no work
        return Adviser, (self.found,)


@dataclass(frozen=True, slots=True)
class Advised:
    """A report with advice."""

    _adviser: Adviser = field(
        default_factory=Adviser,
        repr=False,
        compare=False,
        kw_only=True,
        metadata={"key": None},
    )

    @property
    def advice(self) -> tuple[Advice, ...]:
        """The changes that lower the peak, the most first; each predicted, with the change made.

        Found when it is first read, in some predictions more. Until then the report holds the
        function and what it was given. A report that was read from a file has none.
        """
        return self._adviser.advice()

    def _facts(self) -> dict[str, Any]:
        # predicting is nothing that writing a report down should do
        return facts_of(self) | {"advice": plain(self._adviser.found)}


@dataclass(frozen=True, slots=True)
class PeakReport(Advised, Report):
    """The memory that work takes at its worst moment.

    Attributes:
        peak_bytes: what is alive then, with what was there before.
        baseline_bytes: what was there before.
        categories: the bytes that are alive then, in this order: "parameters", "buffers",
            "gradients", "optimizer state", "inputs" (arguments, and other tensors that modules
            hold), "activations" (made by the forward pass and alive at its end) and "temporaries"
            (made and freed in between, and used by kernels). They add up to ``peak_bytes``.
        phase: what runs then: ``"forward"``, ``"backward"`` or ``"optimizer step"``.
        operation: the operation that runs then.
        place: the module and the line of the forward pass that it belongs to.
        device: whose memory it is.
        approximate: whether the figures may be wrong.
        reasons: why.
        later_peak_bytes: what is alive at the worst moment of every later step, which begins with
            the state that the optimizer's first one has made; None where it makes none.
        allocated_bytes: what the blocks of the device's caching allocator take then, each rounded
            up; None on the CPU, which has none.
        reserved_bytes: the most that this allocator takes from the device; None on the CPU.
        later_reserved_bytes: the same of a later step; None where none is other.
        allowance_bytes: what kernels of which nothing is known may take on top, at the most.
        host_bytes: what ``fully_shard`` or ``save_on_cpu`` offloads to the memory of the host and
            what the optimizer takes there, at the worst moment there; None if nothing is offloaded.
        budget_bytes: what there is, as ``against`` was told; None if it was not.
    """

    peak_bytes: int
    baseline_bytes: int
    categories: Mapping[str, int]
    phase: str
    operation: str
    place: str
    device: str
    approximate: bool
    reasons: tuple[str, ...]
    later_peak_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    later_reserved_bytes: int | None = None
    allowance_bytes: int = 0
    host_bytes: int | None = None
    budget_bytes: int | None = None
    # no part of what is compared and written: on an accelerator the blocks of each step
    _records: tuple[MemoryRecord, ...] = field(
        default=(), repr=False, compare=False, metadata={"key": None}
    )

    _is_spaced = True
    _figures: ClassVar = ("needed_bytes",)

    def __post_init__(self) -> None:
        # All of them, at zero: a script may ask for any.
        ordered = dict.fromkeys(CATEGORIES, 0) | dict(self.categories)
        object.__setattr__(self, "categories", ordered)

    def __reduce__(self) -> tuple[Any, ...]:
        # the blocks of the work are of this process
        return _again, (type(self), self.to_dict(), self._adviser)

    @property
    def needed_bytes(self) -> int:
        """The bytes that the device must have: its reserved ones, else the peak, and the allowance.

        Of the first step or a later one, whichever takes more.
        """
        if self.reserved_bytes is None:
            return max(self.peak_bytes, self.later_peak_bytes or 0) + self.allowance_bytes
        return max(self.reserved_bytes, self.later_reserved_bytes or 0) + self.allowance_bytes

    def fits(self, budget: int | str) -> bool:
        """Return whether the work fits, for certain.

        Args:
            budget: what there is, in bytes, or as ``"24GiB"``.

        Returns:
            True where the budget has room for ``needed_bytes``, or where the device's allocator
            has enough once it gives back what it caches, as it does before it fails. False says
            that it may not fit: what is only assumed, as `reasons` tell, is assumed to take as
            much as it can.

        Raises:
            ByteSizeError: the budget is no number of bytes.
        """
        budget_bytes = parse_bytes(budget)
        if self.needed_bytes <= budget_bytes or not self._records:
            return self.needed_bytes <= budget_bytes
        limit_bytes = budget_bytes - self.allowance_bytes
        return all(replay(each, limit_bytes)[2] for each in self._records)

    def against(self, budget: int | str) -> Self:
        """Return the same report, which shows beside what there is.

        Args:
            budget: in bytes, or as ``"24GiB"``.

        Raises:
            ByteSizeError: the budget is no number of bytes.
        """
        return replace(self, budget_bytes=parse_bytes(budget))

    def summary(self) -> str:
        """Return how much, when and where, in one sentence."""
        about = "about " if self.approximate else ""
        where = f", at {self.place}" if self.place else ""
        what = f", in {self.operation.removesuffix('.default')}" if self.operation else ""
        phase = _WORDS_OF_PHASES.get(self.phase, f"the {self.phase}")
        step = "The first step" if self._later_takes_more else "A step"
        return (
            f"{step} takes {about}{format_bytes(self.peak_bytes)} of {self.device} at most: "
            f"in {phase}{where}{what}."
        )

    @property
    def _later_takes_more(self) -> bool:
        return (self.later_peak_bytes or 0) > self.peak_bytes

    def verdict(self) -> str:
        """Return whether it fits in the budget, in one sentence; "" without one."""
        if self.budget_bytes is None:
            return ""
        spare_bytes = self.budget_bytes - self.needed_bytes
        amounts = self.budget_bytes, self.needed_bytes, abs(spare_bytes)
        budget, needed, difference = map(format_bytes, amounts)
        if spare_bytes < 0 and self.fits(self.budget_bytes):
            return f"It fits in {budget}, once the allocator gives back what it caches."
        if spare_bytes < 0:
            return f"It does not fit in {budget}: it needs {needed}, {difference} too much."
        return f"It fits in {budget}: it needs {needed}, {difference} to spare."

    def _parts(self) -> list[Part]:
        first, *others = filter(None, (self.verdict(), self.summary(), *self._facts_beside()))
        needed = format_bytes(self.needed_bytes)
        title = (
            f"The first step (later ones need up to {needed}):" if self._later_takes_more else ""
        )
        parts: list[Part] = [
            Paragraph(first, "\n".join(others)),
            # the categories are those of the first step
            Amounts(title, list(self._amounts()), self.budget_bytes),
        ]
        if self.reasons:
            told = "Approximate, for these reasons:" if self.approximate else "Assumed:"
            parts.append(Paragraph(told, "\n".join(f"- {reason}" for reason in self.reasons)))
        return parts

    def _facts_beside(self) -> Iterator[str]:
        yield f"{format_bytes(self.baseline_bytes)} of it were there before."
        if self._later_takes_more:
            later = format_bytes(self.later_peak_bytes or 0)
            yield f"Later steps take {later}: they begin with the optimizer's state."
        if self.reserved_bytes is not None:
            amounts = self.reserved_bytes, self.later_reserved_bytes or 0, self.allowance_bytes
            reserved, later, kernels = map(format_bytes, amounts)
            more = f", {later} for later steps" if amounts[1] > amounts[0] else ""
            if self.allowance_bytes:
                all_ = format_bytes(self.needed_bytes)
                more += f", and kernels may take {kernels} more: {all_} in all"
            yield f"The allocator reserves {reserved} for it{more}."
        if self.host_bytes is not None:
            host = format_bytes(self.host_bytes)
            yield f"In host memory, what is offloaded takes {host} at most."

    def _amounts(self) -> Iterator[tuple[str, int]]:
        yield from self.categories.items()
        if self.allocated_bytes is not None:
            yield _ROUNDING, self.allocated_bytes - self.peak_bytes
        if self.reserved_bytes is not None:
            yield _RESERVED, self.reserved_bytes - (self.allocated_bytes or self.peak_bytes)
        yield _ALLOWANCE, self.allowance_bytes


def _again(cls: type[PeakReport], data: Mapping[str, object], adviser: Adviser) -> PeakReport:
    return replace(cls.from_dict(data), _adviser=adviser)
