"""What grows from step to step: the same place holds more tensors, or more of a graph, each time.

A look is a search of the heap, so there are few, ever farther apart: a leak grows at each of them,
and a cache that fills up has stopped by then. Between two looks only sums are kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple, Self

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._text import counted, format_bytes, listed

from .._owners import SAVED, StorageEntry
from .._reports import Snapshot, place_of, snapshot

# Twice in a row may be a cache that fills up between them; see
# test_a_cache_that_is_full_is_no_growth.
_LOOKS = 3
_MOST_SHARE = 0.1
_MOST_NAMES = 3
_ADVICE_OF_VALUES = "Keep .detach() or .item() of what is kept, or bound it."
_ADVICE_OF_ENDS = "If it is no result, bound it."


@dataclass(frozen=True, slots=True)
class Growth:
    """A place that held more at each look than at the one before it.

    Attributes:
        name: the variable, attribute or container, as in `MemReport`; indices are left out.
        n_before: tensors there at the first of the looks.
        n_tensors: tensors there at the last look.
        n_bytes: their bytes at the last look.
        bytes_before: their bytes at the first of the looks.
        n_steps: steps of the optimizer from the first look to the last; 0 where only the end of
            the program was looked at.
        graph_bytes: by how much what autograd saved grew meanwhile, where tensors of this place
            have graphs.
    """

    name: str
    n_before: int
    n_tensors: int
    bytes_before: int
    n_bytes: int
    n_steps: int
    graph_bytes: int = 0

    @property
    def grown_bytes(self) -> int:
        """By how much it grew, with what its graphs keep."""
        return self.n_bytes - self.bytes_before + self.graph_bytes

    def __str__(self) -> str:
        if not self.n_steps:
            text = f"{self.name} holds {counted(self.n_tensors, 'tensor')} at the end, "
            return f"{text}{format_bytes(self.n_bytes)}. {_ADVICE_OF_ENDS}"
        grown = self.n_bytes - self.bytes_before
        parts = []
        if grown:
            n_new = self.n_tensors - self.n_before
            what = f"{counted(n_new, 'tensor')}, " if n_new > 0 else ""
            parts.append(f"grew by {what}{format_bytes(grown)}")
        if self.graph_bytes:
            parts.append(f"kept graphs of autograd alive, {format_bytes(self.graph_bytes)}")
        steps = counted(self.n_steps, "step")
        return f"{self.name} {' and '.join(parts)} in {steps}. {_ADVICE_OF_VALUES}"


class _Look(NamedTuple):
    """The sums of one moment.

    Attributes:
        step: how many steps there were before.
        places: tensors and bytes by place.
        rooted: places some of whose tensors have a graph.
        saved_bytes: what autograd saved, in all.
    """

    step: int
    places: dict[str, tuple[int, int]]
    rooted: tuple[str, ...]
    saved_bytes: int


class GrowthWatch:
    """Looks at the tensors of the process as a program trains.

    It looks after some of the steps of the first optimizer that makes one: 1, 2, 3, 4, 6, 8, 12, 16
    and so on. No more than a tenth of the time goes into that.

    Example:
        >>> import torch
        >>> from tenure.profiler import GrowthWatch
        >>> model, losses = torch.nn.Linear(2, 1), []
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with GrowthWatch() as watch:
        ...     for _ in range(4):
        ...         loss = model(torch.ones(8, 2)).mean()
        ...         losses.append(loss)
        ...         loss.backward()
        ...         optimizer.step()
        >>> print(watch.growth()[0])
        losses grew by 2 tensors, 8 B in 2 steps. Keep .detach() or .item() of what is kept, ...
    """

    def __init__(self) -> None:
        self._n_steps = 0
        self._next = 1
        self._looks: list[_Look] = []
        self._first: weakref.ref[Optimizer] | None = None
        self._hook: Any = None
        self._began, self._looked = 0.0, 0.0
        self._lock = threading.Lock()

    @property
    def n_looks(self) -> int:
        """How often it has looked while the program ran."""
        return len(self._looks)

    def begin(self) -> None:
        """Look from now on."""
        self._began = perf_counter()
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def end(self) -> None:
        """Look no more; what was seen stays."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __enter__(self) -> Self:
        """Look while a block runs."""
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        self.end()

    def growth(self, at_end: Snapshot | None = None) -> tuple[Growth, ...]:
        """What grew, the largest first.

        Args:
            at_end: where there were too few steps to see growth, containers of this moment that
                hold several tensors are told instead; None tells nothing then.
        """
        if len(self._looks) >= _LOOKS:
            found = _grown(self._looks)
        elif at_end is not None:
            found = _held(at_end)
        else:
            found = []
        return tuple(sorted(found, key=lambda each: (-each.grown_bytes, each.name)))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # several optimizers take turns, and what is alive after one is not what is after another
        first = None if self._first is None else self._first()
        if first is None:
            self._first = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._n_steps += 1
        if self._n_steps < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._look()
        finally:
            self._lock.release()

    def _look(self) -> None:
        began = perf_counter()
        # a long search beside short steps waits for more of them
        if len(self._looks) >= _LOOKS and self._looked > _MOST_SHARE * (began - self._began):
            self._next = self._n_steps + max(1, self._n_steps // 8)
            return
        self._looks.append(_looked_at(self._n_steps, snapshot()._entries))
        # the first of all and the last few decide
        del self._looks[1 : -_LOOKS - 1]
        self._looked += perf_counter() - began
        self._next = _after(self._n_steps)


def _after(step: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    power = 1 << (step.bit_length() - 1)
    return power + power // 2 if power >= 2 and step < power + power // 2 else 2 * power


def _looked_at(step: int, entries: Iterable[StorageEntry]) -> _Look:
    places: dict[str, tuple[int, int]] = {}
    rooted: dict[str, None] = {}
    saved_bytes = 0
    for entry in entries:
        if entry.owner.category == SAVED:
            saved_bytes += entry.owner.n_bytes
        # without a kind it is a model's or an optimizer's, which grow by what they do
        if entry.kind not in ("", "unknown", "autograd"):
            place = place_of(entry)
            n, n_bytes = places.get(place, (0, 0))
            places[place] = n + 1, n_bytes + entry.owner.n_bytes
            if entry.has_graph:
                rooted[place] = None
    return _Look(step, places, tuple(rooted), saved_bytes)


def _grown(looks: list[_Look]) -> list[Growth]:
    looks = looks[-_LOOKS:]
    first, last = looks[0], looks[-1]
    n_steps = last.step - first.step
    saved = [look.saved_bytes for look in looks]
    graph_bytes = saved[-1] - saved[0] if _rises(saved) else 0
    names = [
        name for name in last.places if _rises([look.places.get(name, (0, 0))[1] for look in looks])
    ]
    # one graph can be of several: it is told once, of the first that has one
    of_graph = next((name for name in names if name in last.rooted), None)
    found = []
    for name in names:
        (n_before, bytes_before), (n, n_bytes) = first.places.get(name, (0, 0)), last.places[name]
        held = graph_bytes if name == of_graph else 0
        found.append(Growth(name, n_before, n, bytes_before, n_bytes, n_steps, held))
    if graph_bytes and of_graph is None:
        # a sum that is carried on has one tensor at all times, and ever more behind it
        roots = listed(last.rooted, _MOST_NAMES) if last.rooted else "something"
        found.append(Growth(roots, 0, 0, 0, 0, n_steps, graph_bytes))
    return found


def _rises(values: list[int]) -> bool:
    return all(before < after for before, after in pairwise(values))


def _held(at_end: Snapshot) -> list[Growth]:
    look = _looked_at(0, at_end._entries)
    return [
        Growth(name, 0, n, 0, n_bytes, 0)
        for name, (n, n_bytes) in look.places.items()
        if n > 1 and name.endswith("[…]")
    ]
