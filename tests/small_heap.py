"""Hides what was there before a file of tests from the collector, and from searches of the heap.

Half a million objects are imported, and none of them holds a tensor of a test. Each collection and
each search would look at all of them: that is most of what a test of these takes.
"""

import gc

_unfreeze = gc.unfreeze


def hide() -> None:
    """Hide what is there: a search would undo ``gc.freeze``, and so find it."""
    gc.freeze()
    gc.unfreeze = lambda: None


def show() -> None:
    """Make it what it is in a program."""
    gc.unfreeze = _unfreeze
    gc.unfreeze()
