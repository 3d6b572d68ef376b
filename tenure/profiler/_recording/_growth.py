"""What grows: piles of storages by place, compared over looks.

A leak adds to what is there, at about the same rate, up to the last look. A batch of another size
replaces what was there; a cache that fills adds ever less, or has stopped.

Invariant: a look keeps no tensor alive.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import UntypedStorage

from tenure._text import counted, format_bytes

from .._owners import BUFFERS, OPTIMIZER_STATE, PARAMETERS, SAVED, StorageEntry
from .._reports import advice_of_growth, cycle_of, keyed_place_of, place_of

LOOKS = 3
"""Fewer looks than these tell nothing."""
# Where tensors are replaced by larger ones, sizes may vary by chance.
_RISES_OF_REPLACED = 4
# A place has stopped growing if, at its lowest rate so far, so many more tensors would have come.
_MISSED = 1.5
# It has stopped if the last rise brought so much less than the first of two, or than all of more,
# and nothing came since.
_LESS = 2
# A place fills up if the second half of the time has brought a fourth of the first half, or less.
_FILLING = 4
# A mapping with more keys is a cache, and none of them says where it grows.
_MOST_KEYS = 16
# Storages of a pile that are looked for at the next look.
_MOST_SAMPLES = 8
_MAIN, _OF_EACH, _GRAPH, _HELD = "__main__.", "[…]", "graph of ", ", held by "
# A variable that a function or a call has bound.
_BOUND = re.compile(r"((?:closure|default|partial) of [^:]+): (.+)")
# What a program names by number, such as `model.last7`, is a container without indices.
_NUMBER = re.compile(r"\d+(?=[^.\]]*$)")
_UNNAMED = "something without a name"
_NO_VARIABLE = frozenset({"", "unknown", "autograd"})
_ADVICE_OF_GRAPHS = "Keep .detach() or .item() of what is kept, or bound it."


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
        last_step: how many there were before the last look.
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

    def __str__(self) -> str:
        parts, n_new = [], self.n_tensors - self.n_before
        more_bytes = self.n_bytes - self.before_bytes
        # of a running sum the first tensor is no growth
        is_graph_alone = self.graph_bytes > 0 and not more_bytes
        if n_new > 0 and not is_graph_alone:
            parts.append(f"grew by {counted(n_new, 'tensor')}, {format_bytes(more_bytes)}")
        elif more_bytes > 0:
            parts.append(f"grew by {format_bytes(more_bytes)}")
        if self.graph_bytes:
            graphs = "a growing graph" if is_graph_alone else "graphs"
            parts.append(f"kept {graphs} of autograd alive, {format_bytes(self.graph_bytes)}")
        when = f"from step {self.first_step} to step {self.last_step}"
        advice = advice_of_growth(self.name, _ADVICE_OF_GRAPHS if self.graph_bytes else "")
        return f"{_subject(self.name)} {' and '.join(parts)} {when}. {advice}"


class Pile(NamedTuple):
    """What one place held at one look: a variable, a container, a module, or a graph.

    Attributes:
        n: how many storages.
        n_bytes: their bytes.
        rising_since: the step of the first look since which it never shrank.
        staying_since: the same, and since which its storages were not replaced.
        keys: how many there are by the place with its keys; none if there are many keys.
        is_variable: it is the place of a variable, and no module's, optimizer's or graph's.
        samples: some of the storages.
    """

    n: int
    n_bytes: int
    rising_since: int
    staying_since: int
    keys: dict[str, int]
    is_variable: bool
    samples: tuple[weakref.ref[UntypedStorage], ...]


_NOTHING = Pile(0, 0, 0, 0, {}, False, ())


class Look(NamedTuple):
    """The piles of one moment.

    Attributes:
        step: how many steps there were before.
        piles: by place; the place of a graph is that of the tensor that has it.
    """

    step: int
    piles: dict[str, Pile]

    def at(self, place: str) -> Pile:
        """Return the pile of a place; nothing if it did not exist."""
        return self.piles.get(place, _NOTHING)


def looked_at(step: int, entries: Iterable[StorageEntry], before: Look | None) -> Look:
    """Put the storages that are alive on piles.

    Args:
        step: how many steps there were before.
        entries: the storages.
        before: the look before.
    """
    found: dict[str, list[StorageEntry]] = {}
    for entry in entries:
        for place in _places_of(entry):
            found.setdefault(place, []).append(entry)
    return Look(step, {place: _pile(step, place, each, before) for place, each in found.items()})


def _places_of(entry: StorageEntry) -> Iterator[str]:
    """Yield the places of a storage: for a module's tensor also each module around it."""
    name, category = entry.owner.name, entry.owner.category
    if category == SAVED:
        yield _GRAPH + place_of(entry.owner.graph or _UNNAMED)
    if entry.kind == "cycle":
        yield cycle_of(name)
    elif entry.kind not in _NO_VARIABLE:
        inner, held, holders = place_of(name).partition(_HELD)
        yield f"{_NUMBER.sub('…', inner)}{held}{holders}"
    elif entry.kind == "unknown":
        yield _UNNAMED
    elif not entry.kind and category in (PARAMETERS, BUFFERS):
        yield from _around(name)
        yield name
        # of many models, the class grows
        if (model_class := _class_of(name)) != name.partition(".")[0]:
            yield model_class
    # the state of a parameter is there after its first step; a list in it is a history
    elif not entry.kind and category == OPTIMIZER_STATE and name.endswith("]"):
        yield place_of(name)


def _around(name: str) -> Iterator[str]:
    """Yield the modules around a tensor, or a module, of a model."""
    return (name[:i] for i, letter in enumerate(name) if letter == ".")


def _class_of(name: str) -> str:
    """Return the class of the model of a name, for `Linear#2.weight` the same as for the first."""
    return name.partition(".")[0].partition("#")[0]


def _pile(step: int, place: str, entries: list[StorageEntry], before: Look | None) -> Pile:
    keys = Counter(keyed_place_of(entry.owner.name) for entry in entries)
    n, n_bytes = len(entries), sum(entry.owner.n_bytes for entry in entries)
    rising_since = staying_since = step if before is None else before.step
    pile = None if before is None else before.piles.get(place)
    if pile is not None:
        is_rising = n >= pile.n and n_bytes >= pile.n_bytes
        now = {id(each.identity) for each in entries}
        stays = is_rising and all(id(sample) in now for sample in pile.samples)
        rising_since = pile.rising_since if is_rising else step
        staying_since = pile.staying_since if stays else step
    samples = entries[:: max(1, n // _MOST_SAMPLES)]
    return Pile(
        n,
        n_bytes,
        rising_since,
        staying_since,
        keys if len(keys) <= _MOST_KEYS else {},
        entries[0].kind not in _NO_VARIABLE,
        tuple(each.identity for each in samples if each.identity is not None),
    )


def grown(looks: Sequence[Look]) -> dict[str, Growth]:
    """Return the places that grow up to the last of some looks, each with its growth.

    Args:
        looks: at least one look.
    """
    last = looks[-1]
    rising = {
        place: looks[at]
        for place in last.piles
        if (at := _growing_from(looks, [look.at(place) for look in looks])) is not None
    }
    graphs = {place: look for place, look in rising.items() if place.startswith(_GRAPH)}
    values = {place: look for place, look in rising.items() if place not in graphs}
    # without the modules around a module or buffer that grows
    outer = {
        each
        for place in values
        for module in _around(place)
        for each in (module, _class_of(module))
    }
    found = {
        place: _growth(place, first, last, is_of_values=True)
        for place, first in values.items()
        if place not in outer
    }
    return {
        name: _growth(name, first, last, is_of_values=False)
        for place, first in graphs.items()
        if (name := place.removeprefix(_GRAPH)) not in found
    } | found


def _growth(name: str, first: Look, last: Look, *, is_of_values: bool) -> Growth:
    before, now = first.at(name), last.at(name)
    graph_bytes = max(0, last.at(_GRAPH + name).n_bytes - first.at(_GRAPH + name).n_bytes)
    # with its keys, where all that grew is under one of them
    rose = [key for key, n in now.keys.items() if n > before.keys.get(key, 0)] or [*now.keys]
    return Growth(
        _shown(rose[0] if len(rose) == 1 and now.is_variable else name),
        before.n,
        now.n,
        before.n_bytes if is_of_values else now.n_bytes,
        now.n_bytes,
        first.step,
        last.step,
        graph_bytes,
    )


def _shown(place: str) -> str:
    """Return the name of a place in the program: that of the container, not of its items."""
    return place.removeprefix(_MAIN).removesuffix(_OF_EACH)


def _subject(name: str) -> str:
    """Return a name with its variable first, and what holds that in parentheses."""
    inner, _, holders = name.partition(_HELD)
    bound = _BOUND.fullmatch(inner)
    variable = bound[2] if bound else inner
    around = [bound[1] if bound else "", f"held by {holders}" if holders else ""]
    held = ", ".join(filter(None, around))
    return f"{variable.removesuffix(_OF_EACH)} ({held})" if held else name


# --- does it grow?


def _growing_from(looks: Sequence[Look], piles: Sequence[Pile]) -> int | None:
    """Return the index of the look from which on a place grows; None if it does not."""
    steps = [look.step for look in looks]
    figures = [(pile.n, pile.n_bytes) for pile in piles]
    sinces = (piles[-1].staying_since, LOOKS - 1), (piles[-1].rising_since, _RISES_OF_REPLACED)
    for since, fewest in sinces:
        rises = [
            i for i in range(1, len(looks)) if steps[i - 1] >= since and figures[i] > figures[i - 1]
        ]
        if len(rises) >= fewest:
            is_over = _has_stopped(steps, piles, rises) or _is_filling(steps, piles, rises[0] - 1)
            return None if is_over else rises[0] - 1
    return None


def _has_stopped(steps: list[int], piles: Sequence[Pile], rises: list[int]) -> bool:
    """Return whether growth has stopped: its lowest rate would have shown in these steps."""
    n_steps = steps[-1] - steps[rises[-1]]
    rates = [
        max(1, piles[after].n - piles[before].n) / max(1, steps[after] - steps[before])
        for before, after in pairwise([rises[0] - 1, *rises])
    ]
    first, last = rises[0] - 1, rises[-1]
    mean = (piles[last].n - piles[first].n) / max(1, steps[last] - steps[first])
    usual = rates[0] if len(rates) == LOOKS - 1 else mean
    if n_steps and rates[-1] * _LESS <= usual:
        return True
    return min(rates) * n_steps >= _MISSED


def _is_filling(steps: list[int], piles: Sequence[Pile], first: int) -> bool:
    """Return whether little came in the second half of the time beside the first."""
    middle = (steps[first] + steps[-1]) / 2
    half = max(i for i in range(first, len(piles)) if steps[i] <= middle)
    # a tensor that is replaced by larger ones fills nothing, though it stays one
    return all(
        (each[-1] - each[half]) * _FILLING <= each[half] - each[first]
        for each in ([pile.n for pile in piles], [pile.n_bytes for pile in piles])
    )
