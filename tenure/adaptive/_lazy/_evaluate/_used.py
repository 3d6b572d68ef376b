"""What a backward pass uses up, and what of the recording is kept for others.

Invariant: what is needed by a value that somebody has, and whose graph is whole, stays recorded.
"""

from __future__ import annotations

from .._label import SHARED
from .._tape import Tape, leaf_of, makers_of


def consume(tape: Tape, root: int | None = None) -> None:
    """What was recorded is used up, or what a root was made of; the rest is data from now on."""
    labels, spent = tape.labels(), graph_of(tape, root)
    metas = {n: m for e in tape.entries for n, m in zip(e.made, e.shape.metas, strict=True)}
    others = {n for n in tape.handles if n in metas and metas[n].requires_grad} - spent
    kept = []
    if root is not None and others:
        writes = any(entry.shape.changed for entry in tape.entries)
        # what writes in place is a part of what it writes into
        kept = list(tape.entries) if writes else makers_of(tape.entries, others, tape.views)
    tape.spent |= {n for n in tape.handles if n in metas and metas[n].requires_grad} - others
    tape.spent |= {n for entry in kept for n in entry.made if n in spent}
    tape.drop_all_but(kept)
    made = {n for entry in kept for n in entry.made}
    for number in list(tape.values):
        # what is written by calls that may run again is written once
        if number not in made and number not in tape.written:
            value = tape.values.pop(number)
            tape.leaves[number] = leaf_of(value, labels.get(number, SHARED))


def graph_of(tape: Tape, root: int | None) -> set[int]:
    """The values that the gradient of a root flows through; of no root all of them."""
    if root is None:
        return {n for entry in tape.entries for n in entry.made}
    views = tape.views
    # views share memory, and a detached one shares no graph: they tell what was written alone
    wanted, shared = {root}, {views.get(root, root)}
    found = {root}
    for entry in reversed(tape.entries):
        metas = (*entry.shape.metas, *entry.shape.changed.values())
        gives = wanted.intersection(entry.made) or entry.written(views) & shared
        if gives and any(meta.requires_grad for meta in metas):
            found.update(entry.made)
            wanted.update(entry.reads)
            shared.update(views.get(n, n) for n in entry.reads)
    return found | (wanted & tape.spent)
