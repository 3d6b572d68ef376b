"""Hides what was there before a file of tests from the collector, and from searches of the heap.

Half a million objects are imported, and none of them holds a tensor of a test. Each collection and
each search would look at all of them: that is most of what a test of these takes.
"""

import gc
from typing import Any

from tenure._heap import _collector, _index

_ASKING: tuple[Any, ...] = (_collector, _index)
_has_frozen = _collector.has_frozen


def hide() -> None:
    """Hide what is there: a search is told that nothing is frozen, and so does not look for it."""
    gc.freeze()
    for module in _ASKING:
        module.has_frozen = lambda: False


def show() -> None:
    """Make it what it is in a program."""
    gc.unfreeze()
    for module in _ASKING:
        module.has_frozen = _has_frozen
