"""What a storage counts as: told by a census, or by when it came and went.

A storage that a backward pass let go was held for that pass; one that was made in a pass and
outlived it is a gradient. So most are known without a look at the heap, which is dear; what a
census says of a storage that it has seen goes before, and counts for its whole life. After a step
it also counts for others of the same line and size that outlive one: what is kept in each step, as
a graph by its loss, is told by the few steps that are looked at.
"""

from __future__ import annotations

from bisect import bisect_left

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


class Outliving:
    """What storages count as that have outlived a step of an optimizer, by their kin.

    Kin are made by the same line and have the same size. What is alive in the midst of a step tells
    nothing of its kin: a graph has all there that will soon be let go.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._told: dict[tuple[int, int], int] = {}
        self._seen: dict[tuple[int, int], int] = {}

    def step(self, moment: int) -> None:
        """An optimizer has made a step; what came before the moment and is alive outlives it."""
        self._steps.append(moment)

    def saw(self, place: int, n_bytes: int, category: int) -> None:
        """A census after the step says what one counts as."""
        kin = place, n_bytes
        # of several that differ nothing is known
        self._seen[kin] = category if self._seen.get(kin, category) == category else UNKNOWN

    def seen(self) -> None:
        """The census was taken."""
        self._told.update(self._seen)
        self._seen = {}

    def told(self, place: int, n_bytes: int, begin: int, end: int) -> int:
        """What one counts as that no census has seen, and that was alive in these moments."""
        category = self._told.get((place, n_bytes), UNKNOWN)
        if category == UNKNOWN:
            return UNKNOWN
        i = bisect_left(self._steps, end)
        return category if i and self._steps[i - 1] >= begin else UNKNOWN

    def forget(self) -> None:
        """All that is told from here on lives past the last step."""
        del self._steps[:-1]
