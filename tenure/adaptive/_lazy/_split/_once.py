"""What of a split runs once, on the whole batch: what parts are made of, and what is made of them.

Invariant: nothing here has a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tenure.scopes import persist

from .._label import SHARED, Label
from .._tape import Entry, Leaf, Tape, leaf_of, replayed, run
from ._split_plan import SplitPlan


def run_late(
    entries: Iterable[Entry], env: dict[int, Any], tape: Tape, data: dict[int, Leaf]
) -> dict[int, Tensor]:
    """Run what wants all samples, for those of its values that somebody has."""
    live = {n for e in entries for n in e.outs if n in tape.handles}
    needed, found = set(live), []
    for entry in reversed(list(entries)):
        makes = [n for n in entry.outs if n is not None]
        is_known = all(n in env for n in makes) and bool(makes)
        writes = entry.shape.changed or entry.shape.writes_plain
        if not is_known and (any(n in needed for n in makes) or writes):
            found.append(entry)
            needed.update(entry.reads)
    run(replayed(found[::-1], live), env, tape.kind, others=data, graphs=False)
    return {n: env[n].detach() for n in live if n in env}


def run_before(
    tape: Tape, plan: SplitPlan, labels: Mapping[int, Label], leaves: Mapping[int, Leaf]
) -> dict[int, Leaf]:
    """Everything that parts are made of: leaves, and what is made of the batch alone."""
    data = dict(leaves)
    if not plan.before:
        return data
    env: dict[int, Any] = {
        n: leaf.value.clone() if n in plan.written_first else leaf.value for n, leaf in data.items()
    }
    made = [*plan.written_first, *(n for entry in plan.before for n in entry.made)]
    with torch.no_grad(), persist():
        run(replayed(plan.before, [*made, *env]), env, tape.kind, graphs=False)
    for number in made:
        data[number] = leaf_of(env[number], labels.get(number, SHARED))
    return data
