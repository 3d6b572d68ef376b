"""One look at the tensors of the process: sums by place, and whether what was there before stayed.

Invariant: a look keeps no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import UntypedStorage

from .._owners import BUFFERS, OPTIMIZER_STATE, PARAMETERS, SAVED, StorageEntry
from .._reports import keyed_place_of, place_of

# A mapping with more of them is a cache, and none of them says where it grows.
_MOST_KEYS = 16
# Storages of a place that are looked for at the next look.
_MOST_SAMPLES = 8
_NO_VARIABLE = frozenset({"", "unknown", "autograd"})
_Identity = weakref.ref[UntypedStorage]


class Sums(NamedTuple):
    """What one place held at one look.

    Attributes:
        n_tensors: how many tensors.
        n_bytes: their bytes.
        stayed: whether the tensors that were there at the look before still are.
    """

    n_tensors: int = 0
    n_bytes: int = 0
    stayed: bool = True


class Look(NamedTuple):
    """The sums of one moment.

    Attributes:
        step: how many steps there were before.
        places: sums by place: a variable, a container, a module, a buffer, an optimizer's list.
        rooted: places some of whose tensors have a graph.
        saved: bytes that autograd saved, by the place of the tensor whose graph it is; that of
            graphs without one is empty.
        keyed: tensors by place, and there by the place with its keys: that of a container with
            many keys is left out.
        variables: the places that are no module's and no optimizer's.
        samples: some of the storages of each place.
    """

    step: int
    places: dict[str, Sums]
    rooted: tuple[str, ...]
    saved: dict[str, int]
    keyed: dict[str, dict[str, int]]
    variables: frozenset[str]
    samples: dict[str, list[_Identity]]

    def at(self, place: str) -> Sums:
        """The sums of a place; nothing if it did not exist."""
        return self.places.get(place, Sums())


def looked_at(step: int, entries: Iterable[StorageEntry], before: Look | None) -> Look:
    """Sum up what is alive.

    Args:
        step: how many steps there were before.
        entries: the storages.
        before: the look before.
    """
    rooted: dict[str, None] = {}
    saved: dict[str, int] = {}
    keyed: dict[str, dict[str, int]] = {}
    found: dict[str, list[StorageEntry]] = {}
    for entry in entries:
        owner = entry.owner
        if owner.category == SAVED:
            root = place_of(owner.graph or "")
            saved[root] = saved.get(root, 0) + owner.n_bytes
        for place in _places_of(entry):
            found.setdefault(place, []).append(entry)
        if entry.kind not in _NO_VARIABLE:
            place = place_of(owner.name)
            of_keys = keyed.setdefault(place, {})
            # one more than is told is as many as there may be
            if len(of_keys) <= _MOST_KEYS:
                key = keyed_place_of(owner.name)
                of_keys[key] = of_keys.get(key, 0) + 1
            if entry.has_graph:
                rooted[place] = None
    few = {place: of_keys for place, of_keys in keyed.items() if len(of_keys) <= _MOST_KEYS}
    samples = {place: _samples(each) for place, each in found.items()}
    gone = {} if before is None else before.samples
    places = {
        place: Sums(
            len(each),
            sum(entry.owner.n_bytes for entry in each),
            _have_stayed(gone.get(place), each),
        )
        for place, each in found.items()
    }
    return Look(step, places, tuple(rooted), saved, few, frozenset(keyed), samples)


def without(dropped: Look, before: Look, after: Look) -> Look:
    """The later of three looks as the one that follows the first of them."""
    places = {}
    for name, sums in after.places.items():
        between = dropped.at(name)
        stayed = between.stayed and between.n_tensors >= before.at(name).n_tensors
        places[name] = sums._replace(stayed=sums.stayed and stayed)
    return after._replace(places=places)


def _places_of(entry: StorageEntry) -> Iterable[str]:
    """The places that a storage belongs to: of a module's tensor each module around it as well."""
    name, category = entry.owner.name, entry.owner.category
    if entry.kind not in _NO_VARIABLE:
        return (place_of(name),)
    if entry.kind:
        return ()
    if category in (PARAMETERS, BUFFERS):
        parts = name.split(".")
        return (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    # the state of a parameter is there after its first step; a list in it is a history
    if category == OPTIMIZER_STATE and name.endswith("]"):
        return (place_of(name),)
    return ()


def _have_stayed(samples: list[_Identity] | None, entries: list[StorageEntry]) -> bool:
    if not samples:
        return True
    now = {id(each.identity) for each in entries}
    return all(id(identity) in now for identity in samples)


def _samples(entries: list[StorageEntry]) -> list[_Identity]:
    stride = max(1, len(entries) // _MOST_SAMPLES)
    return [each.identity for each in entries[::stride] if each.identity is not None]
