"""What has to be alike on all ranks of a step, and what the samples of one weigh beside all.

Here is what both kinds of steps have: `StepRanks`, which tries again, and `PlannedRanks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from tenure._errors import AdaptiveUsageError

from .._shares import numbers_by_term
from .._split import StepParts, StepSpec


def asked_by(spec: StepSpec, *, per_rank: bool) -> str:
    """The arguments of a call that have to be the same on all ranks, in words."""
    loss = "outputs" if callable(spec.loss) else spec.loss
    given = [f"{name}=" for name in ("weight", "then", "once") if getattr(spec, name) is not None]
    return ", ".join([f"loss={loss!r}", *given, *(["per_rank=True"] if per_rank else [])])


def numbers_of(weight: Callable[[Any], object], parts: StepParts) -> dict[str | None, float]:
    """What the samples of this rank weigh, by term; one number for all terms has the name None."""
    with torch.no_grad():
        numbers = numbers_by_term(weight(parts.inputs.whole()))
    # an order that is the same on all ranks
    return dict(sorted(numbers.items(), key=lambda named: str(named[0])))


def shares_of(
    numbers: Mapping[str, float], totals: Iterable[float], by_samples: float
) -> dict[str, float]:
    """The share that this rank has in each term.

    Args:
        numbers: what its samples weigh, by term.
        totals: what those of all ranks do, in the same order; zeros may follow.
        by_samples: its share of the samples.
    """
    # the mean over what all weighs nothing has no value; as on one rank samples stand in
    return {
        name: mine / total if total else by_samples
        for (name, mine), total in zip(numbers.items(), totals, strict=False)
    }


def refuse_other_terms(names: Iterable[str]) -> NoReturn:
    """Say that ``weight`` returned other names on another rank; none is one number for all terms.

    Raises:
        AdaptiveUsageError: always.
    """
    raise AdaptiveUsageError(
        f"weight() returned {', '.join(map(repr, names)) or 'one weight'} on this rank, and other "
        "names on another. Nothing was changed. Return the same names on all ranks that have "
        "samples."
    )
