"""What would lower a peak: asked for when it is first read, from whoever knows such changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tenure._show import facts_of, plain
from tenure._text import format_bytes

if TYPE_CHECKING:
    from ._work import Work


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
        if self.saves_bytes > 0:
            effect = f"saves {format_bytes(self.saves_bytes)}"
        else:
            effect = "would not lower the peak"
        others = "; gives other numbers" if self.changes_numbers else ""
        return f"{self.what}: {effect}{others}"

    def __str__(self) -> str:
        return f"{self.summary()}\n    {self.how}"


_Advise = Callable[["Work", int, bool], tuple[Advice, ...]]
_advise: list[_Advise] = []


def advise_with(function: _Advise) -> None:
    """Have a function asked for advice; it knows more of the library than a prediction may.

    Args:
        function: gets the work, its peak in bytes, and whether it has a backward pass.
    """
    _advise[:] = [function]


class Adviser:
    """Keeps a piece of work until advice on it is wanted, and then the advice alone.

    Args:
        work: the work; None where nothing can be said any more.
        peak_bytes: its predicted peak.
        has_backward: whether a backward pass ran in it.
    """

    def __init__(
        self,
        work: Work | None,
        peak_bytes: int = 0,
        has_backward: bool = False,
        found: tuple[Advice, ...] = (),
    ) -> None:
        self._work, self._peak_bytes, self._has_backward = work, peak_bytes, has_backward
        self._found = found
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    @property
    def known(self) -> tuple[Advice, ...]:
        """What was found so far."""
        return self._found

    def advice(self) -> tuple[Advice, ...]:
        """Return changes that lower the peak, the most effective first."""
        work = self._work
        if work is not None and _advise:
            grad, inference = self._modes
            # as it was where the work was predicted
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                found = _advise[0](work, self._peak_bytes, self._has_backward)
            self._found = tuple(sorted(found, key=lambda each: -each.saves_bytes))
            self._work = None
        return self._found

    def __reduce__(self) -> Any:
        # copies and pickles hold no work
        return Adviser, (None, self._peak_bytes, self._has_backward, self._found)


@dataclass(frozen=True, slots=True)
class Advised:
    """A report with advice."""

    _adviser: Adviser | None = field(
        default=None, repr=False, compare=False, kw_only=True, metadata={"key": None}
    )

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What would lower the peak, the most first; each predicted, with the change made.

        Found when it is first read, in some predictions more. Until then the report holds the
        function and what it was given. A report that was read from a file has none.
        """
        return () if self._adviser is None else self._adviser.advice()

    def _facts(self) -> dict[str, Any]:
        facts = facts_of(self)
        # predicting is nothing that writing a report down should do
        known = () if self._adviser is None else self._adviser.known
        return facts | {"advice": plain(known)}
