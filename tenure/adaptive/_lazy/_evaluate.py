"""Computing what was recorded on all samples at once, and reading values.

Invariant: random numbers are drawn, and buffers written, as often as in the program that was
recorded, in whatever order values are read; where it fails, everything is as if nothing had run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tenure._oom import OomInfo, oom_of_work
from tenure.scopes import persist

from .._attempt import release
from .._undo import RngState
from ._meta import SHARED
from ._parts import (
    gradients_in_parts,
    is_known_to_fail,
    is_predicted,
    keep,
    note_split,
    root_of,
    values_in_parts,
)
from ._replay import replayed, run, written_by
from ._tape import RecordedCall, Tape, check_unwritten, leaf_of, makers_of


def value_of(lazy: Any) -> Tensor:
    """Return the tensor that a recorded one stands for, computed if it was not."""
    tape: Tape = lazy._tape.home()
    number: int = lazy._number
    _compute(tape, number, lazy._meta, lazy._is_data)
    return tape.values[number] if number in tape.values else tape.leaves[number].given()


def _compute(tape: Tape, number: int, meta: Any, is_data: bool) -> None:
    pending = tape.pending()
    is_there = number in tape.values or (number in tape.leaves and number not in tape.written)
    # a call that has not run yet may write into it
    if is_there and not any(entry.shape.changed for entry in pending):
        return
    if not pending or (is_data and _run_data(tape, number, pending)):
        return
    is_known = is_known_to_fail(tape, number, meta)
    if not is_known and not is_predicted(tape, number, meta):
        info = run_whole(tape)
        if info is None:
            return
        note_split(tape, root_of(tape, number, meta), info)
    begin(tape)
    try:
        # a loss is read with its gradients, which wait
        if root_of(tape, number, meta) is not None:
            tape.held = number, gradients_in_parts(tape, number, predict=not is_known)
        else:
            keep(tape, values_in_parts(tape))
    except BaseException:
        start_over(tape)
        raise
    _consume_if_done(tape)


def _run_data(tape: Tape, number: int, pending: list[RecordedCall]) -> bool:
    """Run what makes a value of the batch alone, without what else waits; False where it can't."""
    if any(entry.shape.changed for entry in pending) or tape.is_split:
        return False
    found = makers_of(pending, [number], tape.views)
    read = {number, *(n for entry in found for n in entry.reads)}
    check_unwritten(found, {n: tape.leaves[n] for n in read if n in tape.leaves})
    begin(tape)
    made = [n for entry in found for n in entry.made]
    with persist():
        run(replayed(found, [*made, *tape.values]), tape.values, tape.kind, others=tape.leaves)
    for entry in found:
        entry.is_done = True
    tape.tidy()
    return True


def run_whole(tape: Tape) -> OomInfo | None:
    """Run what has not run yet on all samples; what ran out of memory, with all as before."""
    pending = tape.pending()
    check_unwritten(pending, tape.leaves)
    outside = sys.exception()
    begin(tape)
    env: dict[int, Any] = tape.values
    for number in tape.written:
        if number not in env:
            with persist():
                env[number] = tape.leaves[number].given().clone()
    what = replayed(pending, [*tape.handles, *env])
    try:
        with persist():
            run(what, env, tape.kind, others=tape.leaves)
    except Exception as error:
        info = oom_of_work(error, outside)
        if info is None or not info.retry_safe:
            start_over(tape)
            raise
        failure = error
    else:
        for entry in pending:
            entry.is_done = True
        tape.tidy()
        _consume_if_done(tape)
        return None
    release(failure, outside)
    del failure
    start_over(tape)
    return info


class Beginning:
    """What running changes besides values, as it was before the first call ran."""

    def __init__(self, tape: Tape) -> None:
        self._generators = dict(tape.generators)
        devices = () if tape.kind == "cpu" else {leaf.value.device for leaf in tape.leaves.values()}
        self._rng = RngState(list(devices), self._generators.values())
        self._rng.begin()
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def note(self, tape: Tape) -> None:
        """Note what calls that wait will change besides."""
        new = {i: each for i, each in tape.generators.items() if i not in self._generators}
        self._generators |= new
        self._rng.add(new.values())
        for tensor in written_by(tape.pending()):
            if id(tensor) not in self._buffers:
                with torch.no_grad(), persist():
                    self._buffers[id(tensor)] = (tensor, tensor.clone())

    def undo(self) -> None:
        """Bring it back."""
        self._rng.undo()
        with torch.no_grad():
            for tensor, before in self._buffers.values():
                tensor.copy_(before)


def begin(tape: Tape) -> None:
    """Note what running changes, before any call runs that has not run."""
    if tape.start is None:
        tape.start = Beginning(tape)
    tape.start.note(tape)


def start_over(tape: Tape) -> None:
    """Make it as if nothing had run."""
    tape.values.clear()
    for entry in tape.entries:
        entry.is_done = False
    tape.is_split = False
    if tape.start is not None:
        tape.start.undo()
        tape.start = None


def _consume_if_done(tape: Tape) -> None:
    """Without a graph nothing will run again."""
    if not any(meta.requires_grad for entry in tape.entries for meta in entry.shape.metas):
        consume(tape)


def consume(tape: Tape, root: int | None = None) -> None:
    """Drop what a root was made of, or all; what somebody has of it is data from now on."""
    labels, spent = tape.labels(), graph_of(tape, root)
    metas = {n: m for e in tape.entries for n, m in zip(e.made, e.shape.metas, strict=True)}
    trained = {n for n in tape.handles if n in metas and metas[n].requires_grad}
    others = trained - spent
    kept = []
    if root is not None and others:
        writes = any(entry.shape.changed for entry in tape.entries)
        # what writes in place is a part of what it writes into
        kept = list(tape.entries) if writes else makers_of(tape.entries, others, tape.views)
    tape.spent |= trained - others
    tape.spent |= {n for entry in kept for n in entry.made if n in spent}
    tape.drop_all_but(kept)
    made = {n for entry in kept for n in entry.made}
    for number in list(tape.values):
        # what is written by calls that may run again is written once
        if number not in made and number not in tape.written:
            value = tape.values.pop(number).detach()
            tape.leaves[number] = leaf_of(value, labels.get(number, SHARED))


def graph_of(tape: Tape, root: int | None) -> set[int]:
    """Return the values that the gradient of a root flows through; of no root all of them."""
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
