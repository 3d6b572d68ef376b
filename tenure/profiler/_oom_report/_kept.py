"""Piles of things that are kept without use, each with the bytes that would be free without it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from .._owners import GRADIENTS, OTHERS, PARAMETERS, SAVED
from ._facts import Facts
from ._piles import FEWEST_TENSORS, Pile, is_fixed, piles_in, runs_again
from ._variables import GraphVariable
from ._verdict import short
from ._work import line_of, trains

# A graph that this many backward passes began within goes on from step to step.
_FEWEST_STEPS = 2
# a weight that the graph of a tensor without a name, such as its cast, keeps
_LEAF, _NAMELESS = "AccumulateGrad.variable", re.compile(r"Tensor\d+\Z")


def piles_of(facts: Facts) -> list[Pile]:
    """All that is kept, each kind with the bytes that would be free without it."""
    models = list(_models(facts))
    piles = piles_in(facts.entries, facts.scene, facts.joined)
    carried = _carried(facts, piles)
    if carried is not None:
        piles = [pile for pile in piles if not pile.graph_bytes or pile.kind == "cycle"]
    found = [carried, None if carried is not None else _past(facts), _casts(facts)]
    if not any(pile.kind == "gradients" for pile in models):
        found.append(_own(facts))
    return [*models, *piles, *filter(None, found)]


def _models(facts: Facts) -> Iterator[Pile]:
    """Piles of models; a container that the program adds nothing to is no pile."""
    leaks = [pile.place for pile in facts.models if pile.kind == "leak"]
    wanted = {place for place in leaks if is_fixed(place, facts.scene)}
    kept = {*leaks} - wanted
    for pile in facts.models:
        if pile.place not in wanted if pile.kind == "leak" else pile.place not in kept:
            yield pile


def _own(facts: Facts) -> Pile | None:
    """Gradients of the last step, while a forward runs that does not need them."""
    scene = facts.scene
    if not scene.is_forward or scene.is_backward:
        return None
    sizes: Counter[str] = Counter()
    for entry in facts.entries:
        if entry.owner.category == GRADIENTS:
            sizes[entry.owner.name.partition(".")[0]] += entry.owner.n_bytes
    name, _ = next(iter(sizes.most_common(1)), ("", 0))
    return Pile(name, "gradients", sum(sizes.values()), are_models=True) if name else None


def _carried(facts: Facts, piles: list[Pile]) -> Pile | None:
    """A variable whose graph goes on from step to step, or from batch to batch."""
    scene = facts.scene
    places = {short(pile.place) for pile in piles if pile.graph_bytes and pile.kind == "leak"}
    # a long sequence that is trained on looks the same until its backward pass
    if scene.calls_backward:
        endless = scene.all_in_eval and runs_again(facts.entries)
    else:
        endless = runs_again(facts.entries, FEWEST_TENSORS)
    found = [
        variable
        for variable in scene.variables
        if variable.is_carried
        and not variable.is_past
        and (variable.n_steps >= _FEWEST_STEPS or variable.name in places or endless)
    ]
    if not found:
        return None
    best = max(found, key=lambda variable: (not variable.is_scalar, variable.n_bytes))
    saved = max([best.n_bytes, *(p.graph_bytes for p in piles if short(p.place) == best.name)])
    return Pile(
        best.name,
        "carried",
        graph_bytes=saved,
        n_tensors=max(best.n_steps, *(p.n for p in piles if short(p.place) == best.name), 1, 1),
        is_scalar=best.is_scalar,
    )


def _past(facts: Facts) -> Pile | None:
    """A variable that nothing reads any more, with a graph that nothing else holds."""
    variables = facts.scene.variables
    return next(
        (
            Pile(each.name, "past", graph_bytes=each.n_bytes)
            for each in variables
            if each.is_past and each.n_bytes and not any(_shares(v, each) for v in variables)
        ),
        None,
    )


def _shares(live: GraphVariable, past: GraphVariable) -> bool:
    """Whether a variable that is read still holds the same graph."""
    return not live.is_past and live.first <= past.last and 2 * live.n_bytes >= past.n_bytes


def _casts(facts: Facts) -> Pile | None:
    """The casts of weights that autocast keeps while its block is open; nothing in Python does.

    The graph of a cast keeps the weight too, also when its model is gone.
    """
    scene = facts.scene
    if not scene.autocast_dtype:
        return None
    rows = [entry.owner for entry in facts.entries]
    old = [row for row in rows if row.name == _LEAF and _NAMELESS.match(row.graph or "")]
    if trains(facts) and not old:
        return None
    weights = [row for row in rows if row.category == PARAMETERS] + old
    shapes = {row.shape for row in weights} | {row.shape[::-1] for row in weights}
    saved = sum(
        row.n_bytes
        for row in rows
        if row.category in (SAVED, OTHERS)
        and row.dtype == scene.autocast_dtype
        and row.shape in shapes
    )
    unseen = 0
    if facts.total_bytes is not None and facts.free_bytes is not None:
        unseen = max(0, facts.total_bytes - facts.free_bytes - facts.used_bytes)
    n_bytes = saved + unseen
    # While a model is made no operation runs, so all of it is casts. Else they are at most half of
    # the weights.
    if not scene.is_building:
        n_bytes = min(n_bytes, sum(row.n_bytes for row in weights) // 2)
    n_bytes += sum(row.n_bytes for row in old)
    return Pile(line_of(scene.site), "casts", n_bytes) if n_bytes else None
