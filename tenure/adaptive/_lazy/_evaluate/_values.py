"""Values that are asked for: computed once, and kept for who has them.

Invariant: random numbers are drawn, and buffers written, as often as in the program that was
recorded, in whatever order values are read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tenure.scopes import persist

from .._tape import Entry, Tape, check_unwritten, makers_of, replayed, run
from ._parts import (
    gradients_in_parts,
    is_splittable,
    is_to_be_predicted,
    keep,
    note_split,
    root_of,
    values_in_parts,
)
from ._remembered import fails_whole
from ._whole import begin, consume_if_done, run_whole


def value_of(lazy: Any) -> Tensor:
    """The tensor that a recorded one stands for, computed if it was not."""
    tape: Tape = lazy._tape.home()
    number: int = lazy._number
    _compute_for(tape, number, lazy._meta, lazy._is_data)
    if number in tape.values:
        return tape.values[number]
    return tape.leaves[number].value


def _compute_for(tape: Tape, number: int, meta: Any, is_data: bool) -> None:
    pending = tape.pending()
    is_known = number in tape.values or (number in tape.leaves and number not in tape.written)
    # a call that has not run yet may write into it
    if is_known and not any(entry.shape.changed for entry in pending):
        return
    if not pending or (is_data and _run_data(tape, number, pending)):
        return
    is_known = fails_whole(tape) and is_splittable(tape, number, meta)
    if not is_known and not is_to_be_predicted(tape, number, meta):
        info = run_whole(tape)
        if info is None:
            return
        note_split(tape, root_of(tape, number, meta), info)
    _run_split(tape, number, meta, predict=not is_known)


def _run_data(tape: Tape, number: int, pending: list[Entry]) -> bool:
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


def _run_split(tape: Tape, number: int, meta: Any, *, predict: bool) -> None:
    """Compute values in parts: with gradients, that wait, where a loss is wanted."""
    if root_of(tape, number, meta) is not None:
        tape.held, values = gradients_in_parts(tape, number, predict=predict)
    else:
        values = values_in_parts(tape)
    keep(tape, values)
    consume_if_done(tape)


def gradient_of(lazy: Any) -> Any:
    """The gradient of a tensor that was recorded, as far as there is one."""
    tape: Tape = lazy._tape.home()
    leaf = tape.leaves.get(lazy._number)
    value = leaf.value if leaf is not None else tape.values.get(lazy._number)
    return None if value is None else value.grad
