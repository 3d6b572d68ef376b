"""Who still holds a disposed tensor, for the error that its use raises."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import FrameType

from torch import Tensor

from tenure._callers import package_of
from tenure._heap import find_holders

# of the kinds of holders those that a user has stored something in; the rest is on its way
_LASTING = frozenset({"attribute", "container", "global", "closure", "default", "partial", "cache"})


def holder_of(tensor: Tensor) -> str:
    """The name of what holds a handle beside the variables of running functions; "" if nothing."""
    with suppress(Exception):  # what goes wrong here must not hide the error that is coming
        (holders,) = find_holders([tensor])
        passing = _variables_of_torch()
        for holder in holders:
            if not holder.running and holder.kind in _LASTING:
                # who holds the holder is no news to whoever wrote its attribute
                chain = holder.chain.partition(", held by ")[0]
                if not chain.startswith(passing):
                    return chain
    return ""


def _variables_of_torch() -> tuple[str, ...]:
    """How chains begin that lead through the lists in which torch passes its arguments on."""
    names: set[str] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if package_of(frame) == "torch":
            names.add(f"{frame.f_code.co_qualname}.<locals>.")
        frame = frame.f_back
    return tuple(names)
