"""What a storage counts as: told by a census, or by when it came and went.

A storage that a backward pass let go was held for that pass; one that was made in a pass and
outlived it is a gradient. So most are known without a look at the heap, which is dear; what a
census says of a storage that it has seen goes before, and counts for its whole life.
"""

from __future__ import annotations

from .._owners import CATEGORIES, GRADIENTS, OTHERS, SAVED

INPUTS = "inputs"
IN_BACKWARD = "made and let go in backward"
UNEXPLAINED = "temporary or unexplained"
"""What the allocator has in use and no tensor shows: made and let go within an operation, or in
code that no mode sees."""
NAMES: list[str] = [*CATEGORIES[:-1], INPUTS, IN_BACKWARD, OTHERS]
"""The categories of storages by number, in the order in which they are shown."""
UNKNOWN = -1
_INPUTS, _IN_BACKWARD, _OTHERS = map(NAMES.index, (INPUTS, IN_BACKWARD, OTHERS))
_SAVED, _GRADIENTS = NAMES.index(SAVED), NAMES.index(GRADIENTS)


def told_by_census(category: str) -> int:
    """The number of what a census says; unknown where that is only that nothing owns it."""
    if category == OTHERS:
        return UNKNOWN
    # what a pager or the like keeps for a model has categories of its own
    if category not in NAMES:
        NAMES.append(category)
    return NAMES.index(category)


def told_by_life(
    told: int, *, came_in_backward: bool, went_in_backward: bool, is_input: bool
) -> int:
    """What a storage counted as that is gone, or is alive at the end of the recording.

    Args:
        told: what a census has said of it.
        came_in_backward: whether a backward pass made it.
        went_in_backward: whether it went while a pass ran.
        is_input: whether the program brought its data in.
    """
    if told != UNKNOWN:
        return told
    if came_in_backward:
        return _IN_BACKWARD if went_in_backward else _GRADIENTS
    if is_input:
        return _INPUTS
    return _SAVED if went_in_backward else _OTHERS
