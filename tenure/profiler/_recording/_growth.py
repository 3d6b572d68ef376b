"""What grows from step to step: the same place holds more tensors, or more of a graph, each time.

A look is a search of the heap, so there are few, ever farther apart: a leak grows at each of them,
and a cache that fills up has stopped by then. Between two looks only sums are kept.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Self

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenure._text import counted, format_bytes

from .._owners import SAVED, StorageEntry
from .._reports import ADVICE_OF_GROWTH, Snapshot, keyed_place_of, place_of, snapshot

# Twice in a row may be a cache that fills up between them; see
# test_a_cache_that_is_full_is_no_growth.
_LOOKS = 3
# How many looks a program pays for that is over soon, and which share of its time else.
_FIRST_LOOKS = 8
_MOST_SHARE = 0.1
_KEPT = 8
_MAIN, _OF_EACH = "__main__.", "[…]"
_MOST_NAMES = 3
# A mapping with more of them is a cache, and none of them says where it grows.
_MOST_KEYS = 16
_ADVICE_OF_GRAPHS = "Keep .detach() or .item() of what is kept, or bound it."
_ADVICE_OF_ENDS = "If it is no result, bound it."
_Since = Callable[[list[int]], int | None]
"""Of the figures of a place at each look, the first from which on they grow, if they do."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A place that held more at each look than at the one before it.

    Attributes:
        name: the variable, attribute or container, as in `MemReport`; indices are left
            out, but for the one key of a mapping under which all of it grew.
        n_before: tensors there at the first of the looks.
        n_tensors: tensors there at the last look.
        before_bytes: their bytes at the first of the looks.
        n_bytes: their bytes at the last look.
        first_step: how many steps there were before the first of the looks.
        last_step: how many there were before the last look; 0 where only the end of the program was
            looked at.
        graph_bytes: by how much what autograd saved grew meanwhile, where tensors of this place
            have graphs.
    """

    name: str
    n_before: int
    n_tensors: int
    before_bytes: int
    n_bytes: int
    first_step: int
    last_step: int
    graph_bytes: int = 0

    @property
    def grown_bytes(self) -> int:
        """By how much it grew, with what its graphs keep."""
        return self.n_bytes - self.before_bytes + self.graph_bytes

    @property
    def n_steps(self) -> int:
        """How many steps lie between the first of the looks and the last."""
        return self.last_step - self.first_step

    def __str__(self) -> str:
        if not self.last_step:
            text = f"{self.name} holds {counted(self.n_tensors, 'tensor')} at the end, "
            return f"{text}{format_bytes(self.n_bytes)}. {_ADVICE_OF_ENDS}"
        parts, n_new = [], self.n_tensors - self.n_before
        if n_new > 0:
            grown = format_bytes(self.n_bytes - self.before_bytes)
            parts.append(f"grew by {counted(n_new, 'tensor')}, {grown}")
        elif self.n_bytes > self.before_bytes:
            parts.append(f"grew by {format_bytes(self.n_bytes - self.before_bytes)}")
        if self.graph_bytes:
            parts.append(f"kept graphs of autograd alive, {format_bytes(self.graph_bytes)}")
        when = f"from step {self.first_step} to step {self.last_step}"
        advice = _ADVICE_OF_GRAPHS if self.graph_bytes else ADVICE_OF_GROWTH
        return f"{self.name} {' and '.join(parts)} {when}. {advice}"


class _Look(NamedTuple):
    """The sums of one moment.

    Attributes:
        step: how many steps there were before.
        places: tensors and bytes by place.
        rooted: places some of whose tensors have a graph.
        saved: bytes that autograd saved, by the place of the tensor whose graph it is; that of
            graphs without one is empty.
        keyed: tensors by place, and there by the place with its keys: that of a container with
            many keys is left out.
    """

    step: int
    places: dict[str, tuple[int, int]]
    rooted: tuple[str, ...]
    saved: dict[str, int]
    keyed: dict[str, dict[str, int]]


class GrowthWatch:
    """Looks at the tensors of the process as a program trains.

    It looks after some of the steps of the first optimizer that makes one: 1, 2, 3, 4, 6, 8, 12, 16
    and so on. But for the first few looks, no more than a tenth of the time goes into them. A loop
    without an optimizer has it look by `look`, and needs no block.

    Attributes:
        notes: why it has stopped looking, if it has.

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
        >>> (found,) = watch.growth()  # printed, it says that `losses` grew
        >>> found.n_tensors - found.n_before, found.last_step
        (3, 4)
    """

    def __init__(self) -> None:
        self._n_steps = self._n_looks = 0
        self._next = 1
        self._looks: list[_Look] = []
        self.notes: list[str] = []
        self._first: weakref.ref[Optimizer] | None = None
        self._hook: Any = None
        self._began, self._looked = 0.0, 0.0
        self._lock = threading.Lock()

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

    def look(self, step: int) -> Snapshot:
        """Look now.

        Args:
            step: how many steps there were before; more than at the look before.

        Returns:
            What it saw.
        """
        seen = snapshot()
        self._looks.append(_looked_at(step, seen._entries))
        # the last few decide
        del self._looks[:-_KEPT]
        return seen

    def growth(self, at_end: Snapshot | None = None) -> tuple[Growth, ...]:
        """What grew, the largest first.

        Args:
            at_end: what is alive at the end, which is one look more: what rises up to it, and did
                before, has grown. Where there were too few looks to see growth, its containers that
                hold several tensors are told instead; None tells nothing then.
        """
        if len(self._looks) >= _LOOKS:
            found = self._grown_up_to(at_end)
        elif at_end is not None:
            found = _held(at_end)
        else:
            found = []
        return tuple(sorted(found, key=lambda each: (-each.grown_bytes, each.name)))

    def _grown_up_to(self, at_end: Snapshot | None) -> list[Growth]:
        found = _grown(self._looks, _rising_from)
        if at_end is None or self._n_steps <= self._looks[-1].step:
            return found
        # what a function held that has returned is there no more, and stands as it was last seen
        looks = [*self._looks, _looked_at(self._n_steps, at_end._entries)]
        later = {each.name: each for each in _grown(looks, _risen_at_end)}
        return [*later.values(), *(each for each in found if each.name not in later)]

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
            self._look_in_turn()
        # an error in here would be one of the program's step
        except Exception as error:
            self.notes.append(f"it looked for growth up to step {self._n_steps}: {error!r}")
            self._next = sys.maxsize
        finally:
            self._lock.release()

    def _look_in_turn(self) -> None:
        began = perf_counter()
        # a long search beside short steps waits for more of them
        if self._n_looks >= _FIRST_LOOKS and self._looked > _MOST_SHARE * (began - self._began):
            self._next = self._n_steps + max(1, self._n_steps // 8)
            return
        self.look(self._n_steps)
        self._n_looks += 1
        self._looked += perf_counter() - began
        self._next = _after(self._n_steps)


def _after(step: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    power = 1 << (step.bit_length() - 1)
    return power + power // 2 if power >= 2 and step < power + power // 2 else 2 * power


def _looked_at(step: int, entries: Iterable[StorageEntry]) -> _Look:
    places: dict[str, tuple[int, int]] = {}
    rooted: dict[str, None] = {}
    saved: dict[str, int] = {}
    keyed: dict[str, dict[str, int]] = {}
    for entry in entries:
        n_bytes = entry.owner.n_bytes
        if entry.owner.category == SAVED:
            root = place_of(getattr(entry.owner, "graph", None) or "")
            saved[root] = saved.get(root, 0) + n_bytes
        # without a kind it is a model's or an optimizer's, which grow by what they do
        if entry.kind not in ("", "unknown", "autograd"):
            place = place_of(entry.owner.name)
            n, before_bytes = places.get(place, (0, 0))
            places[place] = n + 1, before_bytes + n_bytes
            of_keys = keyed.setdefault(place, {})
            # one more than is told is as many as there may be
            if len(of_keys) <= _MOST_KEYS:
                key = keyed_place_of(entry.owner.name)
                of_keys[key] = of_keys.get(key, 0) + 1
            if entry.has_graph:
                rooted[place] = None
    few = {place: of_keys for place, of_keys in keyed.items() if len(of_keys) <= _MOST_KEYS}
    return _Look(step, places, tuple(rooted), saved, few)


def _grown(looks: list[_Look], since: _Since) -> list[Growth]:
    last = looks[-1]
    values = _rising(looks, since, lambda look: {name: n for name, (_, n) in look.places.items()})
    graphs = _rising(looks, since, lambda look: look.saved)
    if "" in graphs:
        # Whose it is was not told: the first place that grows and has one, else all that have one.
        roots = [name for name in values if name in last.rooted][:1] or last.rooted
        graphs[", ".join(roots[:_MOST_NAMES]) or "something without a name"] = graphs.pop("")
    found = []
    for name in {**values, **graphs}:
        first = values.get(name) or graphs[name]
        (n_before, before_bytes), (n, n_bytes) = (
            look.places.get(name, (0, 0)) for look in (first, last)
        )
        held_bytes = 0
        if name in graphs:
            held_bytes = sum(last.saved.values()) - sum(graphs[name].saved.values())
            if name in last.saved:
                held_bytes = last.saved[name] - graphs[name].saved.get(name, 0)
        if name not in values:
            before_bytes = n_bytes
        figures = n_before, n, before_bytes, n_bytes, first.step, last.step, held_bytes
        found.append(Growth(_shown(_closest(name, first, last)), *figures))
    return found


def _rising(
    looks: list[_Look], since: _Since, figures_of: Callable[[_Look], Mapping[str, int]]
) -> dict[str, _Look]:
    """The names whose figures rise up to the last look, each with the look from which on."""
    figures = list(map(figures_of, looks))
    found = {}
    for name in figures[-1]:
        at = since([each.get(name, 0) for each in figures])
        if at is not None:
            found[name] = looks[at]
    return found


def _rising_from(values: list[int]) -> int | None:
    """The first of the last values that all rise; None where they are too few to tell."""
    first = len(values) - 1
    while first > 0 and values[first - 1] < values[first]:
        first -= 1
    return first if len(values) - first >= _LOOKS else None


def _risen_at_end(values: list[int]) -> int | None:
    """The first of the last values that never fall, where the last one rises as one before did.

    Between the looks and the end of a program may lie most of it, and a place that grows now and
    then stands still in between; a cache that is full stands still at the end.
    """
    first = len(values) - 1
    while first > 0 and values[first - 1] <= values[first]:
        first -= 1
    rises = [i for i in range(first, len(values) - 1) if values[i] < values[i + 1]]
    return rises[0] if len(rises) >= _LOOKS - 1 and rises[-1] == len(values) - 2 else None


def _closest(place: str, first: _Look, last: _Look) -> str:
    """The place with its keys, where all that grew is under one of them."""
    before, now = first.keyed.get(place, {}), last.keyed.get(place, {})
    grown = [key for key, n in now.items() if n > before.get(key, 0)] or [*now]
    return grown[0] if len(grown) == 1 else place


def _shown(place: str) -> str:
    """What a program calls a place: the container, and not what is in it."""
    return place.removeprefix(_MAIN).removesuffix(_OF_EACH)


def _held(at_end: Snapshot) -> list[Growth]:
    look = _looked_at(0, at_end._entries)
    return [
        Growth(_shown(name), 0, n, 0, n_bytes, 0, 0)
        for name, (n, n_bytes) in look.places.items()
        if n > 1 and name.endswith(_OF_EACH)
    ]
