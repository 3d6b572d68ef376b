"""Piles of tensors, graphs, models and garbage that one place keeps, as candidates for a cause.

A place is a name as its function says it, with its indices left out: ``losses[…]``; all garbage is
one place, and all that exceptions keep is another.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from tenure._heap import find_holders, instances, is_kind, tracked_objects, type_name
from tenure._text import counted, format_bytes

from .._owners import (
    OTHERS,
    PARAMETERS,
    SAVED,
    StorageEntry,
    TensorRow,
    outermost,
)
from .._reports import keyed_place_of, place_of
from ._facts import Carried, Facts, bytes_in, short

# Two results are a pair; three of one shape are what a loop has made.
_FEWEST = 3
# A second graph is alive while a third is made: a step that ends leaves none.
_FEWEST_GRAPHS = 2
# A graph that goes on after this many backward passes does so from step to step.
_FEWEST_STEPS = 2
# Runs of one layer: fewer may be a function that is called for a few inputs.
_FEWEST_RUNS = 8
# So many steps of others after its own, an optimizer steps no more.
_STEPS_BACK = 2
_VIEWS, _COPIES = 0.5, 0.8
_TIMES_ITS_GRAPH = 2
_MOST_CHARACTERS = 44
_ELSEWHERE = "keep them on the host or on disk"
_OF_RESULTS = ("Use chunked(collect=).", "Use torch.no_grad().")
_HELD, _CYCLE, _TRACEBACK = ", held by ", ", in a reference cycle", "traceback of "
_UNNAMED = ", which nothing with a name was found to hold"
_ANONYMOUS, _OF_ANONYMOUS = "a container at ", " […]"
_FROM_ITERTOOLS = " (inside a cycle)"
# Variables of a forward pass hold a part of the batch that runs.
OF_FORWARD = ".forward.<locals>."
_IN_FRAME = re.compile(r" in (\S+)\(\): local ")
_CACHE_OF = re.compile(r"lru_cache of ([\w.<>]+)")
# with a graph: it refers to its parameter, and that to it, which no collector sees
_ORPHAN = re.compile(r"(Parameter|Tensor)\d+\.grad\Z")


class Candidate(NamedTuple):
    """Something that may be the cause.

    Attributes:
        cause: its row of the table.
        n_bytes: bytes that would be free without it.
        text: what it is, and what to do about it: the first line.
    """

    cause: str
    n_bytes: int
    text: str


def kept_models(facts: Facts) -> Iterator[Candidate]:
    """Places that keep several models and optimizers, and gradients without use."""
    found = instances(tracked_objects(), nn.Module, Optimizer)
    optimizers = instances(found, Optimizer)
    modules = outermost(instances(found, nn.Module))
    models = [module for module in modules if bytes_in(module, facts.device)]
    # nothing of ours but these lists holds a model while it is asked who does
    del found, modules
    objects, n_steps = [*models, *optimizers], facts.watch.n_steps
    held = find_holders(objects, ignore=(models, optimizers, objects)) if objects else []
    oldest = n_steps - _STEPS_BACK * max(1, len(optimizers))
    steps = ((each, facts.watch.last_steps.get(each, n_steps)) for each in optimizers)
    stepped = {id(p) for each, step in steps if step > oldest for p in parameters_of(each)}
    piles: defaultdict[str, list[tuple[bool, int]]] = defaultdict(list)
    idle: Counter[str] = Counter()
    garbage: Counter[str] = Counter()
    for each, holders in zip(objects, held, strict=True):
        # parts of a model that is being made are in a tuple on its way: nothing keeps them
        if not holders or holders[0].kind == "unknown":
            continue
        # `self` of what runs is called by its class, which says less than any other variable
        own, is_model = type_name(type(each)), is_kind(type(each), nn.Module)
        best = next((h for h in holders if h.named and h.chain != own), holders[0])
        place = _spelled(place_of(best.chain), facts)
        n_bytes = bytes_in(each, facts.device) if is_model else _state_bytes(each)
        if best.kind == "cycle":
            garbage[own] += n_bytes
        # one variable keeps one model, and no pile; its gradients may be without use all the same
        elif n_bytes and "[…]" in place and not facts.program.is_fixed(place):
            piles[_container(place)].append((is_model, n_bytes))
        if is_model and n_steps:
            idle[place] += _idle_bytes(each, facts.device, stepped)
    for own, n_bytes in garbage.items():
        yield _garbage(own, n_bytes)
    for place, kept in piles.items():
        # a model and its optimizer that are kept together are one pile
        n_models, n_bytes = sum(is_model for is_model, _ in kept), sum(n for _, n in kept)
        if n_models >= _FEWEST:
            remedy = f"Bound it, or {_ELSEWHERE}."
            yield _leak(place, n_models, "model", n_bytes, remedy)
        elif (n_optimizers := len(kept) - n_models) >= _FEWEST:
            remedy = "Bound it, or del the old ones."
            yield _leak(place, n_optimizers, "optimizer", n_bytes, remedy)
    for place, n_bytes in idle.items():
        if n_bytes and sum(is_model for is_model, _ in piles[_container(place)]) < _FEWEST:
            keeps = f"{shortened(place)} keeps {format_bytes(n_bytes)} that no step needs"
            text = f"{keeps}. Call zero_grad(set_to_none=True) after its last step."
            yield Candidate("gradients", n_bytes, text)


def _container(place: str) -> str:
    return f"{place.partition('[…]')[0]}[…]"


def _garbage(name: str, n_bytes: int) -> Candidate:
    remedy = "Break it, call gc.collect(), or open a scope around it."
    text = f"{shortened(name)}, {format_bytes(n_bytes)} of garbage. {remedy}"
    return Candidate("cycle", n_bytes, text)


def _state_bytes(optimizer: Any) -> int:
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    return sum(t.nbytes for state in states for t in state.values() if is_kind(type(t), Tensor))


def _idle_bytes(module: nn.Module, device: str, stepped: set[int]) -> int:
    gradients = (p.grad for p in module.parameters() if id(p) not in stepped)
    return sum(g.nbytes for g in gradients if g is not None and str(g.device) == device)


@dataclass(slots=True)
class _StoragePile:
    """The storages that are kept at one place.

    Attributes:
        place: the place.
        own: those of its tensors.
        saved: those that the graphs of its tensors have saved.
        names: of each its holder.
    """

    place: str
    own: list[StorageEntry] = field(default_factory=list)
    saved: list[StorageEntry] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """All that would be free without it."""
        return sum(entry.owner.n_bytes for entry in (*self.own, *self.saved))

    @property
    def shown_bytes(self) -> int:
        """The bytes that its tensors show of their storages."""
        return sum(entry.shown_bytes for entry in self.own)

    @property
    def noun(self) -> str:
        """Its contents, as texts name them."""
        if self.saved:
            return "graph"
        return "view" if self.shown_bytes < _VIEWS * self.n_bytes else "tensor"

    @property
    def is_scalar(self) -> bool:
        """Return whether a number is among its tensors."""
        return not all(entry.owner.shape for entry in self.own)


def kept_tensors(facts: Facts) -> Iterator[Candidate]:
    """Piles of tensors and graphs, and variables that hold graphs without use."""
    piles: dict[str, _StoragePile] = {}
    joined: dict[str, _StoragePile] = {}
    # the largest of a pile is the first of its names
    for entry in sorted(facts.entries, key=lambda entry: -entry.owner.n_bytes):
        row, name = entry.owner, holder_name(entry.owner, facts)
        is_saved = row.graph is not None and row.category == SAVED
        is_kept = row.category in (OTHERS, SAVED) and entry.kind not in ("", "autograd")
        is_joined = _joins(entry, facts)[0] >= _FEWEST
        if OF_FORWARD not in name and (is_joined or is_saved or is_kept):
            place = _spelled(place_of(row.name), facts) if is_joined else _place(name, facts)
            place = _CYCLE if _ORPHAN.match(row.graph or "") else place
            pile = (joined if is_joined else piles).setdefault(place, _StoragePile(place))
            (pile.saved if is_saved else pile.own).append(entry)
            pile.names.append(name)
    found = {place: each for place, pile in piles.items() if (each := _of_pile(pile, facts))}
    graphs = {place for place in found if piles[place].saved} - {_CYCLE, _TRACEBACK}
    if carried := _carried(facts, graphs):
        # what else holds graphs holds mostly that one; a pile that is much larger has its own
        most = _TIMES_ITS_GRAPH * carried.n_bytes
        found = {p: each for p, each in found.items() if p not in graphs or each.n_bytes > most}
    others = (carried or _past(facts), _joined(joined, facts), _casts(facts))
    yield from filter(None, (*found.values(), *others))


def holder_name(row: TensorRow, facts: Facts) -> str:
    """Name the holder of a tensor, or of the graph that saved it, as before the error was raised.

    Where nobody handles an error, what ran is in its traceback alone: that keeps nothing by itself.
    """
    name = (row.graph if row.category == SAVED else None) or row.name
    found = _IN_FRAME.search(name)
    is_own = found and found[1] in facts.raised_in and _HELD not in name
    if found is None or not is_own or not name.startswith((_TRACEBACK, "sys.last_")):
        return name
    return f"{found[1]}.<locals>.{name[found.end() :]}"


def _place(name: str, facts: Facts) -> str:
    """Return the place of a name that `holder_name` gave."""
    if name.endswith(_CYCLE):
        return _CYCLE
    if _TRACEBACK in name or _IN_FRAME.search(name):
        return _TRACEBACK
    return _spelled(place_of(name), facts)


def _spelled(place: str, facts: Facts) -> str:
    """Return a place as its function says it, without what holds it.

    A variable that a function or a call has bound goes by the place where it piles up: `out` of
    each of the lambdas in `callbacks[…]` by the list.
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
        return f"{_ANONYMOUS}{line_of(facts.site)}{_OF_ANONYMOUS}"
    # each member of a set is an index
    return short(inner.replace(" (a member)", "[…]").replace(" (a key)", "[…]"))


def _of_pile(pile: _StoragePile, facts: Facts) -> Candidate | None:
    """Why a pile is of no use, in the order of certainty; None for what is wanted."""
    place, n_bytes, largest = pile.place, pile.n_bytes, pile.names[0]
    size = format_bytes(n_bytes)
    if place == _CYCLE and _ORPHAN.match(largest):
        left = f"backward(create_graph=True){at_line(facts.watch.created_at)} left {size}"
        text = f"{left} of gradients with graphs. Set .grad = None after it."
        return Candidate("cycle", n_bytes, text)
    if place == _CYCLE:
        return _garbage(_spelled(largest.removesuffix(_CYCLE), facts), n_bytes)
    if place == _TRACEBACK:
        # of equal ones, one whose keeper has a name
        held = next((name for name in pile.names if _HELD in name), largest)
        holds = f"{shortened(_keeper_of(held, facts))} holds {size} by its traceback"
        text = f"{holds}. Keep str(error), not the error."
        return Candidate("traceback", n_bytes, text)
    if cached := _CACHE_OF.search(place):
        name, remedy = cached[1], f"call {shortened(cached[1])}.cache_clear()."
        remedy = f"Lower its maxsize=, or {remedy}"
        return _leak(f"lru_cache of {name}", len(pile.own), "result", n_bytes, remedy)
    alike = Counter((each.owner.shape[1:], each.owner.dtype) for each in pile.own)
    repeats = Counter((each.owner.name, each.owner.shape) for each in pile.saved)
    n_graphs = len({each.owner.graph for each in pile.saved})
    n_repeats, n_alike = min(repeats.values(), default=0), max(alike.values(), default=0)
    is_much = n_graphs >= _FEWEST_GRAPHS or max(n_repeats, n_alike * ("…" in place)) >= _FEWEST
    is_bounded = facts.containers.get(place.partition("[…]")[0]) == "bounded"
    if is_bounded or not is_much or (not pile.saved and facts.program.is_fixed(place)):
        return None
    keyed = {_spelled(keyed_place_of(name), facts) for name in pile.names}
    # all of it under one key of a mapping
    name = keyed.pop() if len(keyed) == 1 else place
    name = name.partition(_FROM_ITERTOOLS)[0].removesuffix(_OF_ANONYMOUS)
    remedy = _remedy_of_graphs(pile, facts) if pile.saved else _remedy_of_tensors(pile, facts)
    found = _leak(name, max(n_alike, n_graphs, n_repeats), pile.noun, n_bytes, remedy)
    return found._replace(cause="results") if remedy in _OF_RESULTS else found


def _remedy_of_graphs(pile: _StoragePile, facts: Facts) -> str:
    added = facts.program.added_to(pile.place)
    if pile.place.endswith(".grad"):
        return "Set .grad to None."
    if _gathers(pile, facts) and not pile.is_scalar:
        return _OF_RESULTS[1]
    if needed := facts.program.needs(pile.place):
        return f"Call {needed}.clear() after backward()."
    if pile.is_scalar:
        return f"Keep {added}.item()." if added else "Keep .item() of each."
    return f"Keep {added}.detach(), and bound it."


def _remedy_of_tensors(pile: _StoragePile, facts: Facts) -> str:
    variable = pile.place.partition("[…]")[0]
    container = facts.containers.get(variable)
    if pile.noun == "view":
        copied = ".copy()" if "numpy array" in pile.names[0] else ".clone()"
        return f"They show {format_bytes(pile.shown_bytes)}: keep {copied} of each."
    if _are_copies([entry.owner for entry in pile.own], facts):
        return f"They are copies of weights or gradients: {_ELSEWHERE}."
    if _FROM_ITERTOOLS in pile.place:
        return "It is an itertools.cycle: use `while True: for batch in loader`."
    if _gathers(pile, facts):
        return _OF_RESULTS[0]
    if variable.startswith(_ANONYMOUS):
        return "Take them one at a time."
    if container == "default" or any(entry.kind == "default" for entry in pile.own):
        return f"A default lives for ever: use {variable}=None."
    less = "reduce each to what is needed" if facts.device == "cpu" else "keep .cpu() of each"
    if container == "deque":
        return f"Lower its maxlen=, or {less}."
    return f"Bound it, or {'load a part at a time' if container == 'data' else less}."


def _gathers(pile: _StoragePile, facts: Facts) -> bool:
    """Return whether a variable gathers results of a model that is not trained.

    That shows in lists alone: the rest is out of sight. A mapping of a few lists is a list by
    another name.
    """
    variable, _, inside = pile.place.partition("[…]")
    if variable.startswith(_ANONYMOUS):
        return facts.model is not None and not facts.trains
    container = facts.containers.get(variable, "")
    is_list = container == "list" or (container == "dict" and inside == "[…]")
    is_direct = inside in ("", "[…]") and not any(_HELD in name for name in pile.names)
    return is_list and is_direct and not facts.trains and not facts.program.is_filled(pile.place)


def _are_copies(rows: list[TensorRow], facts: Facts) -> bool:
    """Return whether tensors have the shapes of several weights."""
    weights = {row.shape for row in facts.rows(PARAMETERS)}
    alike = [row for row in rows if row.shape in weights]
    n_bytes = sum(row.n_bytes for row in rows)
    has_several = len({row.shape for row in alike}) > 1
    return has_several and sum(row.n_bytes for row in alike) >= _COPIES * n_bytes


def _keeper_of(name: str, facts: Facts) -> str:
    """Name the keeper of an exception; without one, the function that raised it."""
    # of a coroutine, say, the variable; what holds that is further away
    own, held = _IN_FRAME.split(name)[0], name.partition(_HELD)[2].partition(_HELD)[0]
    keeper = held if held and own.startswith((_TRACEBACK, "frame")) else own
    named = _spelled(place_of(keeper), facts)
    function = _IN_FRAME.search(name)
    raised = f"the error of {function[1]}()" if function else "an error"
    return raised if not keeper or named.startswith((_TRACEBACK, "frame")) else named


def _joins(entry: StorageEntry, facts: Facts) -> tuple[int, str]:
    """Return how often in a row `torch.cat` made a storage of a part of it, and the last line."""
    storage = None if entry.identity is None else entry.identity()
    return (0, "") if storage is None else facts.watch.joined.get(storage, (0, ""))


def _joined(piles: dict[str, _StoragePile], facts: Facts) -> Candidate | None:
    """Return all that grows by `torch.cat` as one candidate, with the name of its largest place.

    The keys and values of a model's layers are many places, and each of them may be small.
    """
    if not piles:
        return None
    largest = max(piles.values(), key=lambda pile: pile.n_bytes)
    n_bytes = sum(pile.n_bytes for pile in piles.values())
    times, site = max(_joins(entry, facts) for entry in (*largest.own, *largest.saved))
    others = f" (and {counted(len(piles) - 1, 'other')})" if len(piles) > 1 else ""
    grows = f"{shortened(largest.place)}{others} grows by torch.cat{at_line(site)}"
    size = f"{format_bytes(n_bytes)} after {times} times"
    return Candidate("leak", n_bytes, f"{grows}, {size}. Bound it, or move it to the host.")


def _carried(facts: Facts, held: set[str]) -> Candidate | None:
    """Return a variable whose graph goes on from step to step, or from batch to batch.

    Args:
        facts: the facts.
        held: the variables that hold graphs.
    """
    # a long sequence that is trained on looks the same until its backward pass
    is_trained = not facts.called_names.isdisjoint(("backward", "grad"))
    fewest = _FEWEST_RUNS if is_trained else _FEWEST
    endless = (facts.all_in_eval or not is_trained) and runs_again(facts, fewest)
    found = [
        each
        for each in facts.carried
        if each.n_steps >= _FEWEST_STEPS or each.name in held or endless
    ]
    if not found:
        return None
    best = max(found, key=lambda each: (not each.is_scalar, each.n_bytes))
    retained = facts.watch.retained_at
    why = f" (retain_graph=True{at_line(retained)})" if retained else ""
    carries = f"{shortened(best.name)} carries its graph from step to step"
    text = f"{carries}, {format_bytes(best.n_bytes)}{why}. {_way_on(best, facts)}"
    return Candidate("leak", best.n_bytes, text)


def _way_on(variable: Carried, facts: Facts) -> str:
    name, plain = variable.name, variable.name.rpartition(".")[2]
    if "[…]" in name:
        return "Go on with t.detach() of each of its tensors."
    if not variable.is_scalar or plain not in facts.program.added:
        return f"Go on with {name}.detach(){', or .item()' if variable.is_scalar else ''}."
    if plain in facts.program.needed:
        return "Call backward() on each, and not on the sum."
    return f"Use {name} += {facts.program.added_to(name) or '(...)'}.item()."


def _past(facts: Facts) -> Candidate | None:
    """Return a variable that nothing reads any more, with a graph that nothing else holds."""
    name, n_bytes = facts.past
    line = line_of(facts.watch.retained_at)
    remedy = f"Leave out retain_graph=True ({line})" if line else "Call backward() on it"
    remedy = remedy if facts.trains else "Use torch.no_grad()"
    holds = f"{name} still holds the graph of the previous step, {format_bytes(n_bytes)}"
    text = f"{holds}. {remedy}, or del {name} first."
    return Candidate("leak", n_bytes, text) if n_bytes else None


def _casts(facts: Facts) -> Candidate | None:
    """Return the casts of weights that autocast alone keeps while its block is open.

    The graph of a cast keeps the weight too, also when its model is gone.
    """
    old = [row for row in facts.rows(SAVED) if row.name == "AccumulateGrad.variable"]
    weights = [*facts.rows(PARAMETERS), *old]
    shapes = {row.shape for row in weights} | {row.shape[::-1] for row in weights}
    casts = [row for row in facts.rows(SAVED, OTHERS) if row.dtype == facts.autocast_dtype]
    n_bytes = sum(row.n_bytes for row in (*casts, *old) if row.shape in shapes)
    # a training has a block for each step
    if facts.trains or not casts or not n_bytes:
        return None
    size = f"autocast around {line_of(facts.site)} keeps {format_bytes(n_bytes)}"
    remedy = "Use autocast(cache_enabled=False), or a block for each batch."
    return Candidate("leak", n_bytes, f"{size} of weights that it has cast. {remedy}")


def shortened(name: str) -> str:
    """Shorten a name so that it fits into the first line."""
    return name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…"


def _leak(name: str, n: int, noun: str, n_bytes: int, remedy: str) -> Candidate:
    text = f"{shortened(name)} keeps {counted(n, noun)}, {format_bytes(n_bytes)}. {remedy}"
    return Candidate("leak", n_bytes, text)


def line_of(site: str) -> str:
    """Return a line without its folder and its function; empty if it is in no file."""
    if site.startswith("<"):
        return ""
    return site.partition(" in ")[0].replace("\\", "/").rpartition("/")[2]


def at_line(site: str) -> str:
    """Return words for a line; empty if it is in no file."""
    return f" at {line}" if (line := line_of(site)) else ""


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def runs_again(facts: Facts, fewest: int = _FEWEST_RUNS) -> bool:
    """Return whether one thing was saved more often than weights can tell.

    Layers save alike, too, and have weights each. Whether the state of a recurrent layer is that of
    one long sequence or of many batches shows in nothing; to cut it helps in both.
    """
    saved = Counter((row.name, row.shape) for row in facts.rows(SAVED))
    return max(saved.values(), default=0) > max(len(facts.rows(PARAMETERS)), fewest)
