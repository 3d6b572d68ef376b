"""All changes that are known, tried on one piece of work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tenure._show import steps

from .._predict import Advice, Work, advise_with
from ._change import Change
from ._checkpointing import checkpointing
from ._cross_entropy import chunked_cross_entropy
from ._of_the_model import paged_weights
from ._of_the_step import (
    autocast,
    dropped_gradients,
    offloaded,
    optimizer_kinds,
    smaller_micro_batches,
)

_logger = logging.getLogger("tenure.adaptive")
# each gets the work, and whether it has a backward pass
_KNOWN: tuple[Callable[[Work, bool], Iterable[Change]], ...] = (
    smaller_micro_batches,
    checkpointing,
    chunked_cross_entropy,
    paged_weights,
    dropped_gradients,
    optimizer_kinds,
    offloaded,
    autocast,
)


def advise(work: Work, peak_bytes: int, has_backward: bool) -> tuple[Advice, ...]:
    """What would lower the peak of a piece of work.

    Args:
        work: it; left as it is.
        peak_bytes: its peak.
        has_backward: whether a backward pass runs in it.
    """
    found: list[Advice | None] = []
    with steps("advice") as show:
        for change in (each for find in _KNOWN for each in find(work, has_backward)):
            show(change.what)
            found.append(_tried(change, work, peak_bytes))
    return tuple(advice for advice in found if advice is not None)


def _tried(change: Change, work: Work, peak_bytes: int) -> Advice | None:
    try:
        found_bytes = change.peak_bytes(work)
    # what the work can't run with, whatever it says then, is no advice
    except Exception:
        _logger.debug("not advised: %s", change.what, exc_info=True)
        return None
    saves_bytes = peak_bytes - found_bytes
    if saves_bytes <= 0 and not change.is_told_anyway:
        return None
    return Advice(change.what, change.how, found_bytes, saves_bytes, change.changes_numbers)


advise_with(advise)
