"""What is kept and of no use any more, each with the bytes that would be free without it.

A place is a name as its function says it, with its indices left out: ``losses[…]``. All garbage is
one place, and all that exceptions keep is another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tenure._text import counted, describe_elements

from .._owners import GRADIENTS, OTHERS, PARAMETERS, SAVED, StorageEntry, TensorRow
from .._reports import keyed_place_of, place_of
from ._facts import Facts
from ._kept_graphs import FEWEST_TENSORS, at_line, carried, casts, line_of, past
from ._kinds import Candidate
from ._scene import Scene, short
from ._watch import Joined

# A second graph is alive while a third is made: a step that ends leaves none.
_FEWEST_GRAPHS = 2
_VIEWS, _COPIES = 0.5, 0.8
_HELD, _CYCLE, _TRACEBACK = ", held by ", ", in a reference cycle", "traceback of "
_UNNAMED = ", which nothing with a name was found to hold"
_ANONYMOUS, _OF_ANONYMOUS = "a container at ", " […]"
_FROM_ITERTOOLS = " (inside a cycle)"
# What a forward pass keeps in variables of its own is a part of the batch that runs.
OF_FORWARD = ".forward.<locals>."
_IN_FRAME = re.compile(r" in (\S+)\(\): local ")
_CACHE_OF = re.compile(r"lru_cache of ([\w.<>]+)")
_INDEXED = re.compile(r"(\w+)\[…\]")
# a chain of objects, each of which refers to the next
_CHAIN = re.compile(r"(\.\w+)\1+")
_LINK = re.compile(r"(\.\w+)\.…")
# of a parameter that is in no module, and that nothing in Python holds
_ORPHANS = re.compile(r"(Parameter|Tensor)\d+\.grad\Z")


@dataclass(slots=True)
class _Pile:
    """What one place keeps.

    Attributes:
        place: the place.
        own: the storages of its tensors.
        saved: what the graphs of its tensors have saved.
        kind: which of `KINDS` it is; empty for no pile.
    """

    place: str
    own: list[StorageEntry] = field(default_factory=list)
    saved: list[TensorRow] = field(default_factory=list)
    kind: str = ""

    @property
    def rows(self) -> list[TensorRow]:
        """All of it."""
        return [*(entry.owner for entry in self.own), *self.saved]

    @property
    def graph_bytes(self) -> int:
        """Bytes that the graphs have saved."""
        return sum(row.n_bytes for row in self.saved)

    @property
    def own_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(entry.owner.n_bytes for entry in self.own)

    @property
    def n_bytes(self) -> int:
        """All that would be free without it."""
        return self.own_bytes + self.graph_bytes

    @property
    def n_tensors(self) -> int:
        """How many of its tensors have one shape but for the first dimension; in a cache, all."""
        if _CACHE_OF.search(self.place):
            return len(self.own)
        shapes = Counter((each.owner.shape[1:], each.owner.dtype) for each in self.own)
        return max(shapes.values(), default=0)

    @property
    def n_graphs(self) -> int:
        """How many tensors have graphs."""
        return len({row.graph for row in self.saved})

    @property
    def n_repeats(self) -> int:
        """How often each thing that its graphs have saved is there; of several the fewest."""
        return min(Counter((row.name, row.shape) for row in self.saved).values(), default=0)

    @property
    def n(self) -> int:
        """How many times something was put there."""
        return max(self.n_tensors, self.n_graphs, self.n_repeats)

    @property
    def counts(self) -> bool:
        """Whether it piles up."""
        if self.n_graphs >= _FEWEST_GRAPHS or self.n_repeats >= FEWEST_TENSORS:
            return True
        return "…" in self.place and self.n_tensors >= FEWEST_TENSORS


# --- places


def _name_of(row: TensorRow, scene: Scene) -> str:
    """What holds a tensor, or the graph that saved it, as before the very error was raised.

    Where nobody handles an error, what ran is in its traceback alone: that keeps nothing by itself.
    """
    name = (row.graph if row.category == SAVED else None) or row.name
    found = _IN_FRAME.search(name)
    is_own = found and found[1] in scene.raised_in and _HELD not in name
    if found is None or not is_own or not name.startswith((_TRACEBACK, "sys.last_")):
        return name
    return f"{found[1]}.<locals>.{name[found.end() :]}"


def _place(name: str, scene: Scene) -> str:
    """The place of a name that `_name_of` gave."""
    if name.endswith(_CYCLE):
        return _CYCLE
    if _TRACEBACK in name or _IN_FRAME.search(name):
        return _TRACEBACK
    return spelled(place_of(name), scene)


def spelled(place: str, scene: Scene) -> str:
    """A place as its function says it, without what holds it.

    What a function or a call has bound is told by where it piles up: `out` of each of the lambdas
    in `callbacks[…]` by the list.
    """
    inner, _, outer = place.partition(_HELD)
    # of a function that waits, such as a coroutine
    inner = inner.rpartition(": local ")[2]
    if " of " in inner and ": " in inner:
        bound = inner.rpartition(": ")[2]
        is_argument = bound.startswith(("args[", "keywords["))
        is_outside = "[…]" in outer and (is_argument or "[…]" not in bound)
        inner = outer.partition(_HELD)[0] if is_outside else bound
    if inner.endswith(_UNNAMED):
        return f"{_ANONYMOUS}{line_of(scene.site)}{_OF_ANONYMOUS}"
    # each member of a set is an index, and a chain of attributes one attribute
    members = inner.replace(" (a member)", "[…]").replace(" (a key)", "[…]")
    return short(_CHAIN.sub(r"\1.…", members))


# --- tensors


def kept_tensors(facts: Facts) -> Iterator[Candidate]:
    """Piles of tensors and graphs, and variables that hold graphs without use."""
    grown: list[tuple[TensorRow, Joined]] = []
    piles = [pile for pile in _piles(facts, grown) if _is_garbage(pile.place) or pile.counts]
    rows = [entry.owner for entry in facts.entries]
    weights = {row.shape for row in rows if row.category == PARAMETERS}
    scalars = {_place(_name_of(row, facts.scene), facts.scene) for row in rows if not row.shape}
    for pile in piles:
        pile.kind = _kind_of(pile, facts, weights, is_scalar=pile.place in scalars)
    on = carried(
        facts, {each.place: (each.n, each.graph_bytes) for each in piles if each.kind == "graphs"}
    )
    for pile in piles:
        if pile.kind and (not on or not pile.saved or pile.kind == "cycle"):
            yield _told(pile, facts, is_scalar=pile.place in scalars)
    yield from on or past(facts)
    yield from _joined(grown, facts.scene)
    yield from casts(facts)


def _is_garbage(place: str) -> bool:
    return place in (_CYCLE, _TRACEBACK)


def _piles(facts: Facts, grown: list[tuple[TensorRow, Joined]]) -> list[_Pile]:
    """The tensors and graphs by place, the largest first; without what grows by `torch.cat`."""
    scene, piles = facts.scene, dict[str, _Pile]()
    for entry in facts.entries:
        row = entry.owner
        is_graph = row.graph is not None and row.category == SAVED
        name = _name_of(row, scene)
        joined = facts.noted.joined_as(entry.identity() if entry.identity else None)
        is_orphan = bool(facts.noted.created_at and _ORPHANS.match(row.graph or row.name))
        place = _CYCLE if is_orphan else _place(name, scene)
        if OF_FORWARD in name:
            continue
        if joined is not None and joined.times >= FEWEST_TENSORS:
            grown.append((row, joined))
        elif is_graph:
            piles.setdefault(place, _Pile(place)).saved.append(row)
        elif (is_orphan and row.category == GRADIENTS) or (
            row.category in (OTHERS, SAVED) and entry.kind not in ("", "autograd")
        ):
            piles.setdefault(place, _Pile(place)).own.append(entry)
    return sorted(piles.values(), key=lambda pile: -pile.n_bytes)


def _kind_of(
    pile: _Pile, facts: Facts, weights: set[tuple[int | str, ...]], *, is_scalar: bool
) -> str:
    """Which of `KINDS` a pile is, in the order of their certainty; empty for what is wanted.

    Whether a variable gathers results shows in lists alone: the rest is out of sight. A mapping of
    a few lists is a list by another name.
    """
    if _is_garbage(pile.place):
        return "cycle" if pile.place == _CYCLE else "traceback"
    if _CACHE_OF.search(pile.place):
        return "cached"
    scene, names = facts.scene, _INDEXED.findall(pile.place)
    variable, _, inside = pile.place.partition("[…]")
    container = scene.containers.get(variable, "")
    is_filled = scene.program is not None and not scene.program.filled.isdisjoint(names)
    if container == "bounded":
        return ""
    if not pile.saved and not is_filled:
        if is_fixed(pile.place, scene):
            return ""
        if sum(entry.shown_bytes for entry in pile.own) < _VIEWS * pile.own_bytes:
            return "views"
        if _are_copies(pile.own, weights):
            return "copies"
    is_list = container == "list" or (container == "dict" and inside == "[…]")
    is_direct = not any(_HELD in _name_of(row, scene) for row in pile.rows)
    gathers = is_list and is_direct and inside in ("", "[…]") and not is_filled
    if variable.startswith(_ANONYMOUS):
        gathers = scene.is_forward and not facts.trains
    if not pile.saved:
        if _FROM_ITERTOOLS in pile.place:
            return "cycled"
        return "results" if gathers and not facts.trains else "tensors"
    if pile.place.endswith(".grad"):
        return "grad graphs"
    is_result = gathers and not is_scalar and not facts.trains
    return "result graphs" if is_result else "graphs"


def is_fixed(place: str, scene: Scene) -> bool:
    """Whether a place is a data set: nothing in the program adds to it."""
    names = _INDEXED.findall(place)
    return bool(names) and all(map(scene.is_fixed, names))


def _are_copies(own: list[StorageEntry], weights: set[tuple[int | str, ...]]) -> bool:
    """Whether tensors have the shapes of weights, and of several."""
    rows = [entry.owner for entry in own]
    alike = [row for row in rows if row.shape in weights]
    n_bytes = sum(row.n_bytes for row in rows)
    has_several = len({row.shape for row in alike}) > 1
    return has_several and sum(row.n_bytes for row in alike) >= _COPIES * n_bytes


def _told(pile: _Pile, facts: Facts, *, is_scalar: bool) -> Candidate:
    kind, scene = pile.kind, facts.scene
    largest = max(pile.rows, key=lambda row: row.n_bytes)
    full_name = _name_of(largest, scene)
    keyed = {spelled(keyed_place_of(_name_of(row, scene)), scene) for row in pile.rows}
    # all of it under one key of a mapping
    place = keyed.pop() if len(keyed) == 1 else pile.place
    name = place.partition(_FROM_ITERTOOLS)[0].removesuffix(_OF_ANONYMOUS)
    if kind == "cycle":
        name = spelled(full_name.removesuffix(_CYCLE), scene)
        if name.endswith(".grad") and facts.noted.created_at:
            kind = "created graphs"
    elif kind == "traceback":
        # of equal ones, one whose keeper has a name
        held = [row for row in pile.rows if _HELD in _name_of(row, scene)]
        largest = max(held, key=lambda row: row.n_bytes, default=largest)
        full_name = _name_of(largest, scene)
        name = _keeper_of(full_name, scene)
    elif kind == "cached" and (called := _CACHE_OF.search(place)):
        name = called[1]
    words = {
        "name": name,
        "n": pile.n,
        "own": len(pile.own),
        "like": f", such as {describe_elements(largest.dtype, largest.shape)}",
        "remedy": _remedy_of(pile, scene, is_scalar=is_scalar),
        "where": full_name,
        "at": at_line(facts.noted.created_at),
        "shown": sum(entry.shown_bytes for entry in pile.own),
        "copied": ".copy()" if "numpy array" in full_name else ".clone()",
    }
    return Candidate(kind, pile.n_bytes, words)


def _remedy_of(pile: _Pile, scene: Scene, *, is_scalar: bool) -> str:
    variable = pile.place.partition("[…]")[0]
    container, program = scene.containers.get(variable, ""), scene.program
    if pile.saved:
        added = program.added_to(pile.place) if program is not None else ""
        names = _INDEXED.findall(pile.place)
        if program is not None and not program.needed.isdisjoint(names):
            return f"Call {names[-1]}.clear() after backward()."
        if is_scalar:
            return f"Keep {added}.item()." if added else "Keep .item() of each."
        return f"Keep {added}.detach(), and bound it." if added else "Keep .detach(), and bound it."
    if variable.startswith(_ANONYMOUS):
        return "Take them one at a time."
    if container == "default" or any(entry.kind == "default" for entry in pile.own):
        return f"A default lives for ever: use {variable}=None."
    link = _LINK.search(pile.place)
    if link is not None:
        return f"Set {link[1]} to None in time."
    return "Bound it, or load a part at a time." if container == "data" else "Bound it."


def _keeper_of(name: str, scene: Scene) -> str:
    """Who keeps an exception; without a keeper, the function that it was raised in."""
    _, _, keeper = name.partition(_HELD)
    # of a coroutine, say, the variable; what holds that is further away
    keeper = keeper.partition(_HELD)[0] or _IN_FRAME.split(name)[0]
    named = spelled(place_of(keeper), scene)
    function = _IN_FRAME.search(name)
    raised = f"the error of {function[1]}()" if function else "an error"
    return raised if not keeper or named.startswith((_TRACEBACK, "frame")) else named


def _joined(grown: list[tuple[TensorRow, Joined]], scene: Scene) -> Iterator[Candidate]:
    """What grows by `torch.cat`, as one with the name of its largest place.

    The keys and values of a model's layers are many places, and each of them may be small.
    """
    sizes: Counter[str] = Counter()
    last: dict[str, Joined] = {}
    for row, joined in grown:
        place = spelled(place_of(row.name), scene)
        sizes[place] += row.n_bytes
        last[place] = max(joined, last.get(place, joined), key=lambda each: each.times)
    for place, _ in sizes.most_common(1):
        words = {
            "name": place,
            "others": f" (and {counted(len(sizes) - 1, 'other')})" if len(sizes) > 1 else "",
            "at": at_line(last[place].site),
            "times": last[place].times,
        }
        yield Candidate("joined", sizes.total(), words)
