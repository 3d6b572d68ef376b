"""What grows from step to step: a place that holds more tensors, or more of a graph, each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenure._text import counted, format_bytes

from .._reports import ADVICE_OF_GROWTH
from ._judged import growing_from
from ._looks import Look, Sums

_MAIN, _OF_EACH = "__main__.", "[…]"
_MOST_NAMES = 3
_ADVICE_OF_GRAPHS = "Keep .detach() or .item() of what is kept, or bound it."
_ADVICE_OF_ENDS = "If it is no result, bound it."


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


def grown(looks: Sequence[Look], *, until: int) -> dict[str, Growth]:
    """The places that grow up to the last of some looks, each with its growth.

    Args:
        looks: at least one look.
        until: the step up to which no more memory was allocated than at the last of them.
    """
    last = looks[-1]
    values = _outermost_left_out(
        {
            name: looks[at]
            for name in last.places
            if (at := growing_from(looks, [look.at(name) for look in looks], until)) is not None
        }
    )
    graphs = {
        name: looks[at]
        for name in last.saved
        if (at := growing_from(looks, [_saved_at(look, name) for look in looks], until)) is not None
    }
    if "" in graphs:
        # Nothing tells whose it is: the first place that grows and has one, else all that have one.
        roots = [name for name in values if name in last.rooted][:1] or last.rooted
        graphs[", ".join(roots[:_MOST_NAMES]) or "something without a name"] = graphs.pop("")
    return {
        name: _growth(name, values.get(name), graphs.get(name), last)
        for name in {**values, **graphs}
    }


def held(look: Look) -> list[Growth]:
    """The containers of variables that hold several tensors at the end."""
    return [
        Growth(_shown(name), 0, n_tensors, 0, n_bytes, 0, 0)
        for name, (n_tensors, n_bytes, _) in look.places.items()
        if n_tensors > 1 and name.endswith(_OF_EACH) and name in look.variables
    ]


def _saved_at(look: Look, name: str) -> Sums:
    # nothing tells whether it is the same graph
    return Sums(0, look.saved.get(name, 0), stayed=False)


def _outermost_left_out(values: dict[str, Look]) -> dict[str, Look]:
    """Without the modules around a module or buffer that grows."""
    outer = {name[:i] for name in values for i, letter in enumerate(name) if letter == "."}
    return {name: look for name, look in values.items() if name not in outer}


def _growth(name: str, of_values: Look | None, of_graphs: Look | None, last: Look) -> Growth:
    first = of_values or of_graphs or last
    before, now = first.at(name), last.at(name)
    graph_bytes = 0
    if of_graphs is not None:
        graph_bytes = sum(last.saved.values()) - sum(of_graphs.saved.values())
        if name in last.saved:
            graph_bytes = last.saved[name] - of_graphs.saved.get(name, 0)
    elif name in last.saved:
        graph_bytes = max(0, last.saved[name] - first.saved.get(name, 0))
    before_bytes = now.n_bytes if of_values is None else before.n_bytes
    return Growth(
        _shown(_closest(name, first, last)),
        before.n_tensors,
        now.n_tensors,
        before_bytes,
        now.n_bytes,
        first.step,
        last.step,
        graph_bytes,
    )


def _closest(place: str, first: Look, last: Look) -> str:
    """The place with its keys, where all that grew is under one of them."""
    before, now = first.keyed.get(place, {}), last.keyed.get(place, {})
    grown = [key for key, n in now.items() if n > before.get(key, 0)] or [*now]
    return grown[0] if len(grown) == 1 else place


def _shown(place: str) -> str:
    """What a program calls a place: the container, and not what is in it."""
    return place.removeprefix(_MAIN).removesuffix(_OF_EACH)
