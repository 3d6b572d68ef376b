"""A loop whose memory must not grow with its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

import pytest

from tenure._text import counted, format_bytes, parse_bytes
from tenure.profiler import Growth, GrowthWatch, Snapshot

_Item = TypeVar("_Item")
# findings of a difference that tell of growth
_GROWTH = ("growth", "graph")


class _Look(NamedTuple):
    """What was alive after some steps."""

    n_done: int
    seen: Snapshot


class TensorGrowth:
    """Goes through items, and fails the test where what is alive grows with each of them."""

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
            ValueError: fewer than two steps follow the warm-up, or items end before the last.
            TypeError: there is no number of items, and no ``steps``.
            ByteSizeError: the limit is no size.
        """
        most_bytes = parse_bytes(limit)
        n_steps = len(items) if steps is None else steps  # type: ignore[arg-type]  # it raises
        if n_steps - warmup < 2:
            raise ValueError(
                f"{counted(n_steps, 'step')} with a warm-up of {warmup} leave {n_steps - warmup}, "
                "and growth shows in two at the least. Give the loop more items."
            )
        return self._watched(iter(items), warmup, n_steps, most_bytes)

    def _watched(
        self, items: Iterator[_Item], warmup: int, n_steps: int, most_bytes: int
    ) -> Iterator[_Item]:
        middle = (warmup + n_steps) // 2
        watch, looks = GrowthWatch(), list[_Look]()
        for n_done in range(n_steps):
            if n_done in (warmup, middle):
                looks.append(_Look(n_done, watch.look(n_done)))
            # no name: an item is given up when its step has ended, as a loader gives it up
            yield _next(items, n_done, n_steps)
        looks.append(_Look(n_steps, watch.look(n_steps)))
        _check(looks, most_bytes, watch.growth())


def _next(items: Iterator[_Item], n_done: int, n_steps: int) -> _Item:
    try:
        return next(items)
    except StopIteration:
        raise ValueError(
            f"the items ended after {counted(n_done, 'step')} of {n_steps}, so growth was not "
            "looked for. Give the loop more of them, or a smaller steps=."
        ) from None


def _check(looks: list[_Look], most_bytes: int, found: tuple[Growth, ...]) -> None:
    first, middle, last = looks
    grown = min(_bytes_for_a_step(first, middle), _bytes_for_a_step(middle, last))
    if grown <= most_bytes:
        return
    n_steps = last.n_done - first.n_done
    change = last.seen.diff(first.seen)
    # what grew at each look is told of the looks, and once
    others = [each for each in change.findings if not found or each.kind not in _GROWTH]
    lines = [
        f"each step left {format_bytes(round(grown))} or more behind, and "
        f"{format_bytes(most_bytes)} is allowed; in {counted(n_steps, 'step')}:",
        *(f"- {each}" for each in found),
        str(replace(change, findings=tuple(others))),
    ]
    pytest.fail("\n".join(lines), pytrace=False)


def _bytes_for_a_step(before: _Look, after: _Look) -> float:
    return (after.seen.total_bytes - before.seen.total_bytes) / (after.n_done - before.n_done)
