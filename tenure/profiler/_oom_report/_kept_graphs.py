"""Graphs that variables hold without use, and casts that autocast remembers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from .._owners import OTHERS, PARAMETERS, SAVED, StorageEntry
from ._facts import Facts
from ._kinds import Candidate
from ._program import Program
from ._scene import GraphVariable

# Two results are a pair; three of one shape are what a loop has made.
FEWEST_TENSORS = 3
# A graph that this many backward passes began within goes on from step to step.
_FEWEST_STEPS = 2
# Runs of one layer: fewer may be a function that is called for a few inputs.
_FEWEST_RUNS = 8
# a weight that the graph of a tensor without a name, such as its cast, keeps
_LEAF, _NAMELESS = "AccumulateGrad.variable", re.compile(r"Tensor\d+\Z")


def carried(facts: Facts, held: Mapping[str, tuple[int, int]]) -> list[Candidate]:
    """A variable whose graph goes on from step to step, or from batch to batch.

    Args:
        facts: what is known.
        held: by its name how many graphs a variable holds, and their bytes.
    """
    scene = facts.scene
    # a long sequence that is trained on looks the same until its backward pass
    if scene.calls_backward:
        endless = scene.all_in_eval and runs_again(facts.entries)
    else:
        endless = runs_again(facts.entries, FEWEST_TENSORS)
    found = [
        each
        for each in scene.variables
        if each.is_carried
        and not each.is_past
        and (each.n_steps >= _FEWEST_STEPS or each.name in held or endless)
    ]
    if not found:
        return []
    best = max(found, key=lambda variable: (not variable.is_scalar, variable.n_bytes))
    n_graphs, graph_bytes = held.get(best.name, (0, 0))
    retained = at_line(facts.noted.retained_at)
    words = {
        "name": best.name,
        "retained": f" (retain_graph=True{retained})" if retained else "",
        "remedy": _way_on(best, scene.program),
        "steps": max(best.n_steps, n_graphs, 2),
    }
    return [Candidate("carried", max(best.n_bytes, graph_bytes), words)]


def _way_on(variable: GraphVariable, program: Program | None) -> str:
    name, plain = variable.name, variable.name.rpartition(".")[2]
    if "[…]" in name:
        return "Go on with t.detach() of each of its tensors."
    if variable.is_scalar and program is not None and plain in program.summed:
        if plain in program.ended:
            return "Call backward() on each, and not on the sum."
        return f"Use {name} += {program.added_to(name) or '(...)'}.item()."
    return f"Go on with {name}.detach(){', or .item()' if variable.is_scalar else ''}."


def past(facts: Facts) -> Iterator[Candidate]:
    """A variable that nothing reads any more, with a graph that nothing else holds."""
    variables, retained = facts.scene.variables, line_of(facts.noted.retained_at)
    live = [each for each in variables if not each.is_past]
    for each in variables:
        shared = any(v.first <= each.last and 2 * v.n_bytes >= each.n_bytes for v in live)
        if each.is_past and each.n_bytes and not shared:
            remedy = f"Leave out retain_graph=True ({retained})" if retained else ""
            remedy = remedy or "Call backward() on it"
            remedy = remedy if facts.trains else "Use torch.no_grad()"
            yield Candidate("past", each.n_bytes, {"name": each.name, "remedy": remedy})
            return


def casts(facts: Facts) -> Iterator[Candidate]:
    """The casts of weights that autocast keeps while its block is open; nothing in Python does.

    The graph of a cast keeps the weight too, also when its model is gone.
    """
    scene = facts.scene
    rows = [entry.owner for entry in facts.entries]
    old = [row for row in rows if row.name == _LEAF and _NAMELESS.match(row.graph or "")]
    if not scene.autocast_dtype or (facts.trains and not old):
        return
    weights = [row for row in rows if row.category == PARAMETERS] + old
    shapes = {row.shape for row in weights} | {row.shape[::-1] for row in weights}
    n_bytes = sum(
        row.n_bytes
        for row in rows
        if row.category in (SAVED, OTHERS)
        and row.dtype == scene.autocast_dtype
        and row.shape in shapes
    )
    if facts.total_bytes is not None and facts.free_bytes is not None:
        n_bytes += max(0, facts.total_bytes - facts.free_bytes - facts.used_bytes)
    # While a model is made no operation runs, so all of it is casts. Else they are at most half of
    # the weights.
    if not scene.building:
        n_bytes = min(n_bytes, sum(row.n_bytes for row in weights) // 2)
    n_bytes += sum(row.n_bytes for row in old)
    if n_bytes:
        around = f" around {line}" if (line := line_of(scene.site)) else ""
        yield Candidate("casts", n_bytes, {"around": around})


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


def line_of(site: str) -> str:
    """A line without its folder and its function; none of what is no file."""
    if site.startswith("<"):
        return ""
    return site.partition(" in ")[0].replace("\\", "/").rpartition("/")[2]


def at_line(site: str) -> str:
    return f" at {line}" if (line := line_of(site)) else ""
