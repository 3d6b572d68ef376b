"""What is kept and of no use any more: what piles up in a place, garbage, what an exception keeps.

A place is a name whose indices are left out: `losses[…]` for `losses[0]`, `losses[1]` and so on.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tenure._torch.storages import key_of

from .._owners import GRADIENTS, OTHERS, PARAMETERS, SAVED, StorageEntry, TensorRow
from .._reports import keyed_place_of, place_of
from ._notes import Joined
from ._scene import Scene

PileKind = Literal[
    "leak",
    "results",
    "cycle",
    "traceback",
    "bounded",
    "joined",
    "copies",
    "views",
    "gradients",
    "optimizers",
    "parts",
    "carried",
    "past",
    "casts",
    "cached",
]

# Two results are a pair; three of one shape are what a loop has made.
FEWEST_TENSORS = 3
# A second graph is alive while a third is made: a step that ends leaves none.
_FEWEST_GRAPHS = 2
# Runs of one layer: fewer may be a function that is called for a few inputs.
_FEWEST_RUNS = 8
_IN_CYCLE = ", in a reference cycle"
_OF_TRACEBACK = "traceback of "
# What a forward pass keeps in variables of its own is a part of the batch that runs.
OF_FORWARD = ".forward.<locals>."
_TRACEBACK = re.compile(r"traceback of \S+ in (\S+)\(\): local (.*)\Z")
IN_FRAME = re.compile(r" in \S+\(\): local ")
# of a parameter that is in no module, and that nothing in Python holds
_ORPHANS = re.compile(r"(Parameter|Tensor)\d+\.grad\Z")
CACHE_OF = re.compile(r"lru_cache of ([\w.<>]+)")
_INDEXED = re.compile(r"(\w+)\[…\]")
# a chain of objects, each of which refers to the next
_CHAIN = re.compile(r"(\.\w+)\1+")
_VIEWS, _COPIES = 0.5, 0.8


@dataclass(slots=True)
class Pile:
    """What one place keeps.

    Attributes:
        place: the place; of garbage and of exceptions, the name of the largest.
        kind: what it is.
        own_bytes: bytes of its tensors.
        graph_bytes: bytes that graphs of autograd have saved, which its tensors hold.
        n_tensors: how many of its tensors have one shape but for the first dimension.
        graphs: the tensors whose graphs they are.
        example: the largest of its tensors.
        is_scalar: its tensors are single numbers.
        repeats: how often each thing that its graphs have saved is there; of several the fewest.
        are_models: it keeps models, with all their weights.
        shown_bytes: of its own bytes those that its tensors show.
        site: the user's line that makes it, where that is known.
        n_places: how many places were joined to this one, with it.
    """

    place: str
    kind: PileKind = "leak"
    own_bytes: int = 0
    graph_bytes: int = 0
    n_tensors: int = 0
    graphs: set[str] = field(default_factory=set)
    example: TensorRow | None = None
    is_scalar: bool = False
    repeats: int = 0
    are_models: bool = False
    shown_bytes: int = 0
    site: str = ""
    n_places: int = 1

    @property
    def n_bytes(self) -> int:
        """All that would be free without it."""
        return self.own_bytes + self.graph_bytes

    @property
    def n(self) -> int:
        """How many times something was put there."""
        return max(self.n_tensors, len(self.graphs), self.repeats)


def piles_in(
    entries: Iterable[StorageEntry], scene: Scene, joined: Mapping[int, Joined]
) -> list[Pile]:
    """What piles up, the largest first."""
    entries = [_as_variable(entry, scene) for entry in entries]
    graphs: defaultdict[str, list[TensorRow]] = defaultdict(list)
    tensors: defaultdict[str, list[StorageEntry]] = defaultdict(list)
    grown: dict[str, Pile] = {}
    for entry in entries:
        row = entry.owner
        is_orphan = bool(scene.created_at and _ORPHANS.match(row.graph or row.name))
        if (made := _joined_as(entry, joined)) is not None:
            _add_joined(grown, row, made)
        elif row.graph is not None and row.category == SAVED:
            graphs[_IN_CYCLE if is_orphan else _place(row.graph)].append(row)
        elif is_orphan and row.category == GRADIENTS:
            tensors[_IN_CYCLE].append(entry)
        elif row.category in (OTHERS, SAVED) and entry.kind not in ("", "autograd"):
            tensors[_place(row.name)].append(entry)
    scalars = {_place(e.owner.name): e.kind for e in entries if not e.owner.shape}
    weights = {e.owner.shape for e in entries if e.owner.category == PARAMETERS}
    found = [
        _pile(place, tensors.get(place, []), graphs.get(place, []), scalars, scene, weights)
        for place in {**tensors, **graphs}
    ]
    found = [*filter(_counts, found), *_as_one(grown)]
    return sorted(found, key=lambda pile: -pile.n_bytes)


def _joined_as(entry: StorageEntry, joined: Mapping[int, Joined]) -> Joined | None:
    """How `torch.cat` made a storage that it makes larger again and again."""
    storage = None if entry.identity is None else entry.identity()
    found = None if storage is None else joined.get(key_of(storage))
    if found is None or found.storage() is not storage or found.times < FEWEST_TENSORS:
        return None
    return None if OF_FORWARD in entry.owner.name else found


def _add_joined(grown: dict[str, Pile], row: TensorRow, made: Joined) -> None:
    place = place_of(row.name)
    pile = grown.setdefault(place, Pile(place, "joined", site=made.site, example=row))
    pile.own_bytes += row.n_bytes
    pile.n_tensors = max(pile.n_tensors, made.times)


def _as_one(grown: Mapping[str, Pile]) -> list[Pile]:
    """Join what grows by `torch.cat` into one pile with the name of its largest place.

    The keys and values of a model's layers are many places, and each of them may be small.
    """
    if not grown:
        return []
    largest = max(grown.values(), key=lambda pile: pile.n_bytes)
    n_bytes = sum(pile.own_bytes for pile in grown.values())
    return [replace(largest, own_bytes=n_bytes, n_places=len(grown))]


def is_fixed(place: str, scene: Scene) -> bool:
    """Whether a place is a data set: nothing in the program adds to it."""
    names = _INDEXED.findall(place)
    return bool(names) and scene.fixed.issuperset(names)


def runs_again(entries: Iterable[StorageEntry], fewest: int = _FEWEST_RUNS) -> int:
    """How often one thing was saved, where that is more often than weights can tell; else 0.

    Layers save alike, too, and have weights each. Whether the state of a recurrent layer is that of
    one long sequence or of many batches shows in nothing; to cut it helps in both.
    """
    rows = [entry.owner for entry in entries]
    saved = Counter((row.name, row.shape) for row in rows if row.category == SAVED)
    n_weights = sum(row.category == PARAMETERS for row in rows)
    most = max(saved.values(), default=0)
    return most if most > max(n_weights, fewest) else 0


def _place(name: str) -> str:
    """The place of a name; all garbage is one, and all that exceptions keep."""
    if name.endswith(_IN_CYCLE):
        return _IN_CYCLE
    of_traceback = _OF_TRACEBACK in name or IN_FRAME.search(name)
    return _OF_TRACEBACK if of_traceback else _without_members(place_of(name))


def _without_members(place: str) -> str:
    """Write each member of a set as an index, and a chain of attributes as one attribute."""
    return _CHAIN.sub(r"\1.…", place.replace(" (a member)", "[…]"))


def _pile(
    place: str,
    entries: list[StorageEntry],
    saved: list[TensorRow],
    scalars: dict[str, str],
    scene: Scene,
    weights: set[tuple[int | str, ...]],
) -> Pile:
    rows = [entry.owner for entry in entries]
    largest = max([*rows, *saved], key=lambda row: row.n_bytes)
    pile = Pile(
        place,
        own_bytes=sum(row.n_bytes for row in rows),
        graph_bytes=sum(row.n_bytes for row in saved),
        n_tensors=max(Counter((row.shape[1:], row.dtype) for row in rows).values(), default=0),
        graphs={row.graph for row in saved if row.graph is not None},
        example=largest,
        is_scalar=place in scalars,
        repeats=min(Counter((row.name, row.shape) for row in saved).values(), default=0),
        shown_bytes=sum(entry.shown_bytes for entry in entries),
    )
    if place == _IN_CYCLE:
        pile.kind = "cycle"
        pile.place = (largest.graph or largest.name).removesuffix(_IN_CYCLE)
    elif place == _OF_TRACEBACK:
        # of equal ones, one whose keeper has a name
        held = [row for row in (*rows, *saved) if ", held by " in (row.graph or row.name)]
        largest = max(held, key=lambda row: row.n_bytes, default=largest)
        pile.kind, pile.place = "traceback", largest.graph or largest.name
    elif not pile.is_scalar:
        pile.kind = _kind_of(place, pile, rows, scene, weights)
        # whatever their shapes
        if pile.kind == "cached":
            pile.n_tensors = len(rows)
    names = (row.graph or row.name for row in (*rows, *saved))
    keyed = {_without_members(keyed_place_of(name)) for name in names}
    # all of it under one key of a mapping
    if pile.place == place and len(keyed) == 1:
        (pile.place,) = keyed
    return pile


def _kind_of(
    place: str,
    pile: Pile,
    rows: list[TensorRow],
    scene: Scene,
    weights: set[tuple[int | str, ...]],
) -> PileKind:
    """Whether a variable of the program gathers what it computes, in the order of its work.

    What an object, a closure or a mapping keeps is out of sight. A mapping of a few lists is a list
    by another name.
    """
    if CACHE_OF.search(place):
        return "cached"
    variable, _, inside = place.partition("[…]")
    kind = scene.containers.get(variable, "")
    if kind == "bounded":
        return "bounded"
    names = _INDEXED.findall(place)
    if not scene.filled_elsewhere.isdisjoint(names):
        return "leak"
    if not pile.graph_bytes:
        if is_fixed(place, scene):
            return "bounded"
        if pile.shown_bytes < _VIEWS * pile.own_bytes:
            return "views"
        if _are_copies(rows, weights):
            return "copies"
    is_list = kind == "list" or (kind == "dict" and inside == "[…]")
    return "results" if is_list and inside in ("", "[…]") else "leak"


def _are_copies(rows: list[TensorRow], weights: set[tuple[int | str, ...]]) -> bool:
    """Whether tensors have the shapes of weights, and of several."""
    alike = [row for row in rows if row.shape in weights]
    n_bytes = sum(row.n_bytes for row in rows)
    has_several = len({row.shape for row in alike}) > 1
    return has_several and sum(row.n_bytes for row in alike) >= _COPIES * n_bytes


def _as_variable(entry: StorageEntry, scene: Scene) -> StorageEntry:
    """An entry with the names that it had before the very error that is explained was raised.

    Where nobody handles an error, what ran is in its traceback alone: that keeps nothing by itself.
    """

    def renamed(name: str) -> str:
        found = _TRACEBACK.match(name)
        if found is None or found[1] not in scene.raised_in:
            return name
        return f"{found[1]}.<locals>.{found[2]}"

    row = entry.owner
    graph = None if row.graph is None else renamed(row.graph)
    return replace(entry, owner=replace(row, name=renamed(row.name), graph=graph))


def _counts(pile: Pile) -> bool:
    if pile.kind in ("cycle", "traceback"):
        return True
    if OF_FORWARD in pile.place or pile.kind == "bounded":
        return False
    has_graphs = len(pile.graphs) >= _FEWEST_GRAPHS or pile.repeats >= FEWEST_TENSORS
    is_indexed = "…" in pile.place
    return has_graphs or (is_indexed and pile.n_tensors >= FEWEST_TENSORS)
