"""A loop whose memory must not grow with its steps."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import pytest

from tenure._text import counted, format_bytes, parse_bytes
from tenure.profiler import Growth, GrowthWatch, Snapshot, SnapshotDiff, TensorRow

_Item = TypeVar("_Item")
# findings of a difference that tell of growth
_GROWTH = ("growth", "graph")


class TensorGrowth:
    """Goes through items, and fails the test where what is alive grows with each of them."""

    def __init__(self) -> None:
        # of each loop that has begun and not ended, how many steps were done, and of how many
        self._left: dict[object, tuple[int, int]] = {}

    def check_ended(self) -> None:
        """Fail the test that has left a loop before its end, where nothing was looked at."""
        for n_done, n_steps in self._left.values():
            pytest.fail(
                f"the loop was left after {n_done} of {counted(n_steps, 'step')}, so "
                "growth was not looked for. Let it run to its end, or give it as many steps=.",
                pytrace=False,
            )

    def __call__(
        self,
        items: Iterable[_Item],
        *,
        steps: int | None = None,
        warmup: int = 2,
        limit: int | str = 0,
    ) -> Iterator[_Item]:
        """Give the items, one for each step.

        What is alive is looked at after the warm-up, in the middle and at the end. It grows where
        it has grown in both halves: what comes once, as a larger batch does, is no leak.

        Args:
            items: what the loop goes through, such as a loader.
            steps: how many of them; None takes all, of which there must be a number.
            warmup: how many steps may fill caches and make the optimizer's state.
            limit: how much each step may leave behind on the average, in bytes or as "1 KiB".

        Raises:
            ValueError: the warm-up is negative, fewer than two steps follow it, or items end before
                the last.
            TypeError: there is no number of items, and no ``steps``.
            ByteSizeError: the limit is no size.
        """
        most_bytes = parse_bytes(limit)
        try:
            n_steps = len(items) if steps is None else steps  # type: ignore[arg-type]  # it raises
        except TypeError:
            raise TypeError(
                f"tensor_growth() got a {type(items).__name__}, which does not say how many items "
                "it has. Say how many steps to take of it, as in tensor_growth(loader, steps=20)."
            ) from None
        if warmup < 0:
            raise ValueError(f"warmup is {warmup}, and no number of steps. Give 0 or more.")
        if n_steps - warmup < 2:
            raise ValueError(
                f"{counted(n_steps, 'step')} with a warm-up of {warmup} leave {n_steps - warmup}, "
                "and growth shows in two at the least. Give the loop more items."
            )
        return self._watched(iter(items), warmup, n_steps, most_bytes)

    def _watched(
        self, items: Iterator[_Item], warmup: int, n_steps: int, most_bytes: int
    ) -> Iterator[_Item]:
        # what a test that has failed left in its traceback would be freed while this one grows
        gc.collect()
        middle = (warmup + n_steps) // 2
        watch = GrowthWatch()
        looks: dict[int, Snapshot] = {}
        for n_done in range(n_steps):
            if n_done in (warmup, middle):
                looks[n_done] = watch.look(n_done)
            self._left[watch] = n_done + 1, n_steps
            # no name: an item is given up when its step has ended, as a loader gives it up
            yield _next(items, n_done, n_steps)
        del self._left[watch]
        looks[n_steps] = watch.look(n_steps)
        _check(looks, most_bytes, watch.growth())


def _next(items: Iterator[_Item], n_done: int, n_steps: int) -> _Item:
    try:
        return next(items)
    except StopIteration:
        raise ValueError(
            f"the items ended after {counted(n_done, 'step')} of {n_steps}, so growth was not "
            "looked for. Give the loop more of them, or a smaller steps=."
        ) from None


def _check(looks: dict[int, Snapshot], most_bytes: int, found: tuple[Growth, ...]) -> None:
    grown = min(
        (after.total_bytes - before.total_bytes) / (end - begin)
        for (begin, before), (end, after) in pairwise(looks.items())
    )
    if grown <= most_bytes:
        return
    first, *_, last = looks
    change = _without_replaced(looks[last].diff(looks[first]))
    # what grew at each look is told of the looks, and once
    others = [each for each in change.findings if not found or each.kind not in _GROWTH]
    lines = [
        f"each step left {format_bytes(round(grown))} or more behind, and "
        f"{format_bytes(most_bytes)} is allowed; in {counted(last - first, 'step')}:",
        *(f"- {each}" for each in found),
        str(replace(change, findings=tuple(others))),
    ]
    pytest.fail("\n".join(lines), pytrace=False)


def _without_replaced(change: SnapshotDiff) -> SnapshotDiff:
    """Leave out tensors that equal ones have replaced, such as the gradients of each step."""
    new, freed = (Counter(map(_alike, rows)) for rows in (change.new, change.freed))
    equal = {each for each, n in new.items() if freed[each] == n}
    return replace(
        change,
        new=tuple(row for row in change.new if _alike(row) not in equal),
        freed=tuple(row for row in change.freed if _alike(row) not in equal),
    )


def _alike(row: TensorRow) -> tuple[object, ...]:
    return row.name, row.shape, row.dtype, row.device, row.n_bytes
