"""Who holds a tensor: the shortest way from a root to each holder, in words, and ranked.

Nothing that was looked at is kept once the answer is given.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tenure._text import counted
from tenure._torch.quiet import without_functions

from ._collector import collector_paused
from ._image import Image
from ._reading import is_kind, type_name
from ._roots import Roots
from ._search import Balance, Edge, Search
from ._words import FAR, Namer, Root, Step, inside, without_repetitions

# kinds whose holder may be a plain variable itself, with as many steps as that takes
_BORROWED = {"view": 1, "autograd": 1, "numpy": 1, "closure": 3}
# of all that is true of a chain, the first of these is its kind
_TELLING = (
    "cycle",
    "autograd",
    "view",
    "numpy",
    "traceback",
    "generator",
    "closure",
    "default",
    "partial",
    "method",
    "cache",
    "context",
    "thread",
    "global",
    "unknown",
    "attribute",
    "container",
)
IN_CYCLE = ", in a reference cycle"
_ENDINGS = {
    "cycle": IN_CYCLE,
    "unknown": ", which nothing with a name was found to hold",
}
# A chain of more steps, as through a linked list, begins anew with its name so far, unless that is
# long: the whole of it takes time and memory by the square of the list.
_MAX_STEPS = 64
_MAX_CHARACTERS = 400
# a chain of fewer steps shows each of them
_MANY_STEPS = 8
# plumbing between an object and what it is made of; a chain does not begin there
_PLUMBING = (dict, tuple, types.CellType)

# A search holds what it looks at, so a second one on another thread would find and follow all that.
_one_search = threading.RLock()
# A fork waits for it: the child has no other thread that would release it, or enable the collector.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_one_search.acquire,
        after_in_parent=_one_search.release,
        after_in_child=_one_search.release,
    )

# an object, and whether what holds it is no more than a variable of a running function
_Place = tuple[int, bool]


class Holder(NamedTuple):
    """One reference that keeps a tensor alive, named from something that is alive by itself.

    A local variable is spelled ``train.<locals>.history`` with the qualified name of its function,
    ``self`` as the name of its class, a global ``module.NAME`` (``__main__.NAME`` in a script). Of
    an ``nn.Module`` the chain shows dotted names from the outermost module on, as in
    ``Model.encoder.layers[0].weight, held by train.<locals>.model``.

    Attributes:
        kind: the most telling of what is on the chain: "autograd", "view", "numpy", "traceback",
            "generator" (coroutines too), "closure", "default", "partial", "method" (bound), "cache"
            (`functools.lru_cache`), "context" (`contextvars`), "thread", "global", "attribute",
            "container", "frame-local"; or "cycle" for garbage that waits for the collector, and
            "unknown" where a reference has no name.
        chain: the names from the root to the tensor.
        running: a frame that runs on this thread holds the tensor as a plain local variable. Its
            function's captured variable, a tuple that is a variable, a view of all of the tensor,
            or a view, array or graph beside a variable of the tensor itself, count as that
            variable; so does all that only the exception in flight holds.
        graph: what holds the graph of autograd that the chain goes through; empty without one.
        named: false where the chain only counts references that have no name.
    """

    kind: str
    chain: str
    running: bool
    graph: str = ""
    named: bool = True


def find_holders(
    objects: Sequence[object],
    *,
    ignore: Collection[object] = (),
    image: Image | None = None,
) -> list[list[Holder]]:
    """Name every reference that keeps objects alive, with a few passes over the heap for all.

    No operation on a tensor runs, no unpack hook of autograd and no code of the objects passed.

    Args:
        objects: tensors of any shape, dtype, layout and device; modules, and any other objects.
        ignore: containers that do not count as holders, such as the caller's own lists.
        image: the caller's image of this moment, which is no holder either; it spares a pass over
            the heap.

    Returns:
        For each object its holders: those whose chain is a name first, the shortest first.
    """
    with _one_search, without_functions(), collector_paused():
        search = Search(objects, (objects, *ignore), Roots(sys._getframe(1)), image)
        chains = Chains(search)
        return [_holders_of(n, search, chains) for n in search.targets]


def weigh_holders(found: object) -> tuple[list[Holder], Balance]:
    """Do as `find_holders` for one object of any kind, and balance the references to it."""
    ours = [found]
    with _one_search, without_functions(), collector_paused():
        # from this very frame on: its argument is a reference as well
        search = Search(ours, (ours,), Roots(sys._getframe()))
        (n,) = search.targets
        return _holders_of(n, search, Chains(search)), search.balance(n)


def _holders_of(n: int, search: Search, chains: Chains) -> list[Holder]:
    found = [Chain(root, ()) for root in search.roots[n] if not root.silent]
    held = (chains.through(edge, n) or chains.loose(edge) for edge in search.parents[n])
    found += filter(None, held)
    # of most tensors there is one, and to rank it is to spell it once more
    if len(found) > 1:
        found.sort(key=_rank)
    variables = [chain for chain in found if _is_variable(chain)]
    holders = [
        Holder(chain.kind, str(chain), _is_running(chain, variables), chain.graph)
        for chain in found
    ]
    if n_unnamed := search.unexplained(n):
        count = counted(n_unnamed, "reference")
        text = f"{count} without a name: a value on its way, or an extension module"
        holders.append(Holder("unknown", text, running=False, named=False))
    return list(dict.fromkeys(holders)) if len(holders) > 1 else holders


def _rank(chain: Chain) -> tuple[bool, int, bool, str]:
    """Sort what roots hold first, short chains before long, and the user's names first."""
    is_loose = chain.root.kind in _ENDINGS
    cost = chain.root.cost + sum(step.cost for step in chain.steps)
    return is_loose, cost, chain.kind in _BORROWED, str(chain)


def _is_variable(chain: Chain) -> bool:
    """Return whether a tensor is the value of a variable, or an item of a tuple that is."""
    return chain.root.running and not _unfrozen(chain)


def _is_running(chain: Chain, variables: list[Chain]) -> bool:
    if not chain.root.running:
        return False
    if chain.root.passing or not (steps := _unfrozen(chain)):
        return True
    first = steps[0]
    if _BORROWED.get(first.kind) != len(steps):
        return False
    if first.kind == "closure":
        return any(variable.root.captured for variable in variables)
    return first.whole or bool(variables)


def _unfrozen(chain: Chain) -> list[Step]:
    """Return the steps of a chain from the first that leaves no tuple."""
    return list(itertools.dropwhile(lambda step: step.frozen, chain.steps))


# --- chains


class _Way(NamedTuple):
    """How a root holds an object: by the last edge from another place, or as itself."""

    root: Root
    cost: int
    edge: Edge | None
    origin: _Place | None
    fleeting: bool

    @property
    def rank(self) -> tuple[int, bool, int, str]:
        """Names of the program, then what will last; of these the short before the long."""
        return self.cost // FAR, self.fleeting, self.cost, self.root.text


# ordered by cost, root's text and number; the fourth is unique, so that ways are never compared
_Entry = tuple[int, str, int, int, _Way]


class Chain(NamedTuple):
    """A root and the steps from it to a tensor."""

    root: Root
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        text, held_by, _ = _spell(self.root, self.steps)
        return text + held_by + _ENDINGS.get(self.root.kind, "")

    @property
    def kind(self) -> str:
        """The most telling kind among the root and the steps."""
        kinds = {self.root.kind, *(step.kind for step in self.steps)}
        return next((kind for kind in _TELLING if kind in kinds), "frame-local")

    @property
    def graph(self) -> str:
        """The part that holds the graph of autograd which the chain goes through."""
        entry = next((i for i, step in enumerate(self.steps) if step.kind == "autograd"), None)
        return "" if entry is None else str(Chain(self.root, self.steps[:entry]))


class Chains:
    """The best chain from a root to every object of a search that a root holds."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._ways: dict[_Place, _Way] = {}
        self._find_ways()

    def through(self, edge: Edge, n: int) -> Chain | None:
        """Return the chain that ends in this edge to an object; None when no root holds its holder.

        Its root has the kind "cycle" where every chain goes through the object itself.
        """
        found = [
            (edge.holder == n or n in self._numbers_on(way), self._further(place, way, edge))
            for place in ((edge.holder, False), (edge.holder, True))
            if (way := self._ways.get(place))
        ]
        if not found:
            return None
        in_cycle, way = min(found, key=lambda entry: (entry[0], entry[1].rank))
        root = way.root._replace(kind="cycle", running=False) if in_cycle else way.root
        return Chain(root, tuple(e.step for e in self._edges_of(way)))

    def _further(self, place: _Place, way: _Way, edge: Edge) -> _Way:
        fleeting = way.fleeting and (edge.step.borrows or way.root.passing)
        return _Way(way.root, way.cost + edge.step.cost, edge, place, fleeting)

    def _edges_of(self, way: _Way) -> list[Edge]:
        edges: list[Edge] = []
        while way.edge is not None and way.origin is not None:
            edges.append(way.edge)
            way = self._ways[way.origin]
        return edges[::-1]

    def _numbers_on(self, way: _Way) -> list[int]:
        return [edge.holder for edge in self._edges_of(way)]

    def _find_ways(self) -> None:
        children: dict[int, list[tuple[int, Edge]]] = {}
        for held, edges in enumerate(self._search.parents):
            for edge in edges:
                if not edge.step.shares:
                    children.setdefault(edge.holder, []).append((held, edge))
        ties = itertools.count()
        entries: list[_Entry] = [
            (root.cost, root.text, n, next(ties), _Way(root, root.cost, None, None, root.running))
            for n, roots in enumerate(self._search.roots)
            for root in roots
            if not root.silent
        ]
        heapq.heapify(entries)
        while entries:
            _, text, n, _, way = heapq.heappop(entries)
            if self._is_news(n, way):
                place = (n, way.fleeting)
                self._ways[place] = way
                for held, edge in children.get(n, ()):
                    further = self._further(place, way, edge)
                    if (further.cost - further.root.cost) % FAR >= _MAX_STEPS:
                        further = self._begun_anew(further)
                    heapq.heappush(entries, (further.cost, text, held, next(ties), further))

    def _begun_anew(self, way: _Way) -> _Way:
        text, held_by, namer = _spell(way.root, [edge.step for edge in self._edges_of(way)])
        if len(text) > _MAX_CHARACTERS:
            text = f"{way.root.text.removesuffix('…')}…"
        root = way.root._replace(text=text, held_by=held_by, namer=namer, cost=way.cost)
        return _Way(root, way.cost, None, None, way.fleeting)

    def _is_news(self, n: int, way: _Way) -> bool:
        if (n, False) in self._ways or (n, way.fleeting) in self._ways:
            return False
        # what a variable holds does not last because it holds itself
        return (n, True) not in self._ways or n not in self._numbers_on(way)

    def loose(self, edge: Edge) -> Chain | None:
        """Return a chain from the nearest holder with a type worth naming; None if tenure's own.

        For an edge that no root is known to hold.
        """
        above = self._above(edge.holder)
        if any(self._search.is_silent(n) for n in above):
            return None
        start = next(filter(self._is_worth_naming, above), edge.holder)
        # what only refers to itself is garbage that waits for the collector
        outside = any(n in self._search.unasked or self._search.unexplained(n) for n in above)
        kind = "unknown" if outside else "cycle"
        name = type_name(type(self._search.alive[start]))
        steps = (*above[start], edge.step)
        if steps[0].anchor and kind == "unknown":
            # "closure of f: t", and not that this is held by a function
            name = ""
        # "list_iterator", and not "list_iterator (inside a list_iterator)"
        first = Step() if steps[0] == inside(name) else steps[0]
        return Chain(Root(name, kind), (first, *steps[1:]))

    def _is_worth_naming(self, n: int) -> bool:
        return not is_kind(type(self._search.alive[n]), *_PLUMBING)

    def _above(self, start: int) -> dict[int, tuple[Step, ...]]:
        """Everything that holds an object, nearest first, with the steps down to it."""
        above: dict[int, tuple[Step, ...]] = {start: ()}
        queue = deque([start])
        while queue:
            n = queue.popleft()
            for holder, step in self._search.parents[n]:
                if holder not in above:
                    above[holder] = (step, *above[n])
                    queue.append(holder)
        return above


def _spell(root: Root, steps: Sequence[Step]) -> tuple[str, str, Namer | None]:
    """Return a chain in words, what holds its beginning, and who spells the next step."""
    text, held_by, module = root.text, root.held_by, ""
    namer: Namer | None = root.namer
    for step in steps:
        anchor = step.anchor or (step.module if not module else "")
        if anchor:
            held_by = _held_by(anchor, step.link, text) + held_by
            text, module = anchor, step.module
        piece, namer = step.spelled(namer)
        text += piece
    if len(steps) >= _MANY_STEPS or "…" in root.text:
        text = without_repetitions(text)
    return text, held_by, namer


def _held_by(anchor: str, link: str, holder: str) -> str:
    """Return the words for what holds an anchor, unless its name says as much already."""
    name = anchor.rpartition(" of ")[2]
    says_it = not holder or holder == name or holder.endswith(f".{name}")
    return "" if says_it else link + holder
