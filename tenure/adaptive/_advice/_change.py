"""A change of a piece of work that may lower its peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .._predict import Work

WITH_INNER = "with_inner"
"""What a function has that runs another one in micro-batches: gives a function that runs it
changed."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Attributes:
        what: it, in words.
        how: a line of Python that makes it.
        made: a block in which it is made; as before after it.
        around: makes the function that runs instead of the work's; None: the same.
        changes_numbers: whether the results are others, beyond the order of sums.
        is_told_anyway: whether to tell it where it does not lower the peak, because people try it.
    """

    what: str
    how: str
    made: Callable[[], AbstractContextManager[Any]] = nullcontext
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = field(default=None)
    changes_numbers: bool = False
    is_told_anyway: bool = False

    def peak_bytes(self, work: Work) -> int:
        """The peak of the work with it."""
        changed = copy.copy(work)
        if self.around is not None:
            inner = getattr(work.fn, WITH_INNER, None)
            changed.fn = self.around(work.fn) if inner is None else inner(self.around)
        with self.made():
            return changed.observe().record.peak().n_bytes


def expression_of(work: Work, module: nn.Module) -> str:
    """How the program reaches a module: ``model.layers[3]``, by the name that its code has."""
    for root_name, root in work.roots.items():
        for path, each in root.named_modules():
            if each is module:
                name = "model" if root is work.fn else root_name
                parts = path.split(".") if path else []
                return name + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in parts)
    return "model"


def is_split(work: Work) -> bool:
    """Whether it runs in micro-batches already."""
    return hasattr(work.fn, WITH_INNER)
