"""Which calls run first, on the whole batch: those that make something of the batch alone.

Invariant: what they read is data, and they write only into what nothing else uses before.
"""

from __future__ import annotations

from torch import nn

from .._tape import Entry, Tape, plain_tensors
from ._groups import touched_groups, written_groups


def made_first(tape: Tape) -> dict[Entry, None]:
    """The calls that give what is made of the batch alone, and what they are made of."""
    entries, views = tape.entries, tape.views
    found = {entry for entry in entries if entry.verdict.kind == "before"}
    alone = of_data(tape) if any(entry.shape.changed for entry in entries) else set()
    # a write that wants all samples, as of those of others into each
    found |= {e for e in alone if e.shape.changed and e.verdict.kind != "chunk"}
    if not found:
        return {}
    n_before = 0
    while len(found) > n_before:
        n_before = len(found)
        wanted = {n for entry in found for n in entry.reads}
        for entry in reversed(entries):
            if entry in found or any(n in wanted for n in entry.made):
                found.add(entry)
                wanted.update(entry.reads)
        touched = {group for entry in found for group in touched_groups(entry, views)}
        found |= {entry for entry in alone if written_groups(entry, views) & touched}
        # what is read before it is written
        ends = {g: e.seq for e in entries if e in found for g in written_groups(e, views)}
        for entry in alone - found:
            if any(entry.seq < ends.get(group, -1) for group in touched_groups(entry, views)):
                found.add(entry)
    return {entry: None for entry in entries if entry in found}


def of_data(tape: Tape) -> set[Entry]:
    """The calls that make something of the batch alone."""
    data = {n for n, leaf in tape.leaves.items() if not leaf.value.requires_grad}
    found = set()
    for entry in tape.entries:
        metas = (*entry.shape.metas, *entry.shape.changed.values())
        plains = plain_tensors((entry.args, entry.kwargs))
        if (
            all(n in data for n in entry.reads)
            and not any(meta.requires_grad for meta in metas)
            and not any(t.requires_grad or isinstance(t, nn.Parameter) for t in plains)
        ):
            found.add(entry)
            data.update(entry.made)
    return found
