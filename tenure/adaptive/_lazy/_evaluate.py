"""Computing what was recorded on all samples at once, and reading values.

Invariant: random numbers are drawn, and buffers written, as often as in the program that was
recorded, in whatever order values are read; where it fails, everything is as if nothing had run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from tenure._errors import BatchCoupledError, OutOfRetriesError
from tenure._oom import OomInfo, oom_of_work
from tenure.scopes import persist

from .._attempt import release
from .._undo import RngState
from ._program import SplitProgram, is_loss, remembered
from ._tape import (
    Handle,
    RecordedCall,
    Tape,
    Value,
    check_unwritten,
    inputs_of,
    makers_of,
    mark_data,
    run,
    written_by,
)

_Found = TypeVar("_Found")
_numbers = count()


def value_of(lazy: Handle) -> Tensor:
    """Return the tensor that a recorded one stands for, computed if it was not."""
    tape, value = lazy._tape, lazy._value
    try:
        _compute(tape, value)
    except BaseException:
        tape.failed.add(value)
        raise
    tape.failed.discard(value)
    found: Tensor = value.cut()
    return found


def pending_of(tape: Tape, value: Value) -> list[RecordedCall]:
    """Return the calls that have to run for a value, and what else somebody has."""
    pending = tape.pending(value)
    # what they take may be gone, if they failed before
    if any(each.tensor is None for each in inputs_of(pending)):
        tape.start_over()
        pending = tape.pending(value)
    return pending


def _compute(tape: Tape, value: Value) -> None:
    pending = pending_of(tape, value)
    writes = any(entry.shape.changed for entry in pending)
    # a call that has not run yet may write into it
    if not pending or (value.tensor is not None and not writes):
        return
    # what is made of the batch alone does not need what else waits
    mark_data(tape.entries)
    alone = makers_of(pending, [value])
    if all(entry.is_data for entry in alone) and not tape.is_split and not writes:
        check_unwritten(alone)
        if unless_too_large(tape, lambda: run_whole(tape, alone)) is None:
            return
    is_root = is_loss(tape, value)
    found: Any = whole_or_parts(
        tape, value, lambda: run_whole(tape, pending_of(tape, value)), is_root=is_root
    )
    # a loss is read with its gradients, which wait
    if found is not None:
        tape.held = value, found
    if not any(entry.trains for entry in tape.entries):
        # nothing will run them again
        consume(tape)


def whole_or_parts(tape: Tape, value: Value, whole: Callable[[], Any], *, is_root: bool) -> Any:
    """Compute a value, of the whole where it fits.

    Args:
        tape: what was recorded.
        value: what is wanted of it.
        whole: runs it whole.
        is_root: whether parts give its gradients, too.

    Returns:
        The result of ``whole``, or the gradients of the parts; None for a value without them.
    """
    check_unwritten(tape.pending(value))
    program = _known_not_to_fit(tape, value, is_root)
    if program is None:
        found: Any = unless_too_large(tape, whole)
        if not isinstance(found, OomInfo):
            return found
        program = SplitProgram(tape, value, is_root=is_root)
        remembered(tape, "whole").new().ran_out(tape.n_samples, 1, found.device)
    if any(entry.is_done for entry in tape.entries):
        tape.start_over()
    begin(tape, program.entries)
    try:
        if is_root:
            return program.gradients()
        program.values()
        return None
    except BaseException:
        tape.start_over()
        raise


def _known_not_to_fit(tape: Tape, value: Value, is_root: bool) -> SplitProgram | None:
    """Return how to split it, if so many samples are known not to fit, and it can be."""
    record = remembered(tape, "whole").known()
    if record is None or record.bad is None or tape.n_samples < record.bad:
        return None
    with suppress(BatchCoupledError, OutOfRetriesError):
        return SplitProgram(tape, value, is_root=is_root)
    return None


def unless_too_large(tape: Tape, work: Callable[[], _Found]) -> _Found | OomInfo:
    """Return what work gives; or what ran out of memory, with all as before."""
    outside = sys.exception()
    try:
        return work()
    except BaseException as error:
        info = oom_of_work(error, outside)
        if info is None or not info.retry_safe:
            tape.start_over()
            raise
        failure = error
    release(failure, outside)
    del failure
    tape.start_over()
    return info


def run_whole(tape: Tape, pending: list[RecordedCall]) -> None:
    """Run calls on all samples."""
    begin(tape, pending)
    env: dict[Value, Any] = {}
    # the others wait on
    waiting = {entry for entry in tape.entries if not entry.is_done}.difference(pending)
    kept = [*tape.alive(), *(value for entry in waiting for value in entry.reads)]
    with persist():
        run(pending, env, kept)
    tape.note_done(pending, env)


class Beginning:
    """What running changes besides values, as it was before the first call ran."""

    def __init__(self, tape: Tape) -> None:
        self._number = next(_numbers)
        self._rng = RngState({v.meta.device for entry in tape.entries for v in entry.reads})
        self._rng.begin()
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def note(self, tape: Tape, entries: list[RecordedCall]) -> None:
        """Note what calls that wait will change besides."""
        self._rng.add(tape.generators.values())
        for tensor in written_by(entries):
            if id(tensor) not in self._buffers:
                with torch.no_grad(), persist():
                    self._buffers[id(tensor)] = (tensor, tensor.clone())

    def joined(self, other: Beginning) -> Beginning:
        """Return that of two tapes that have become one."""
        first, last = sorted((self, other), key=lambda each: each._number)
        first._rng.join(last._rng)
        first._buffers = last._buffers | first._buffers
        return first

    def undo(self) -> None:
        """Bring it back."""
        self._rng.undo()
        with torch.no_grad():
            for tensor, before in self._buffers.values():
                tensor.copy_(before)


def begin(tape: Tape, entries: list[RecordedCall]) -> None:
    """Note what calls will change, before any that has not run."""
    if tape.start is None:
        tape.start = Beginning(tape)
    tape.start.note(tape, entries)


def consume(tape: Tape, root: Value | None = None) -> None:
    """Drop what a root was made of, or all; what somebody has of it is data from now on."""
    made = {value for entry in tape.entries for value in entry.made}
    alive = tape.alive()
    spent = made if root is None else graph_of(tape, root)
    for value in spent:
        value.is_spent |= value.meta.requires_grad
    # values that were not computed are those that failed
    others = [v for v in alive if v in made and v.tensor is None]
    others += [v for v in alive if v in made and v.meta.requires_grad and v not in spent]
    kept: list[RecordedCall] = []
    if others:
        writes = any(entry.shape.changed for entry in tape.entries)
        # what writes in place is a part of what it writes into
        kept = tape.entries if writes else makers_of(tape.entries, others)
    tape.forget(kept)
    still = {value for entry in kept for value in entry.made}
    for value in alive:
        if value in made and value not in still:
            value.settle()


def graph_of(tape: Tape, root: Value) -> set[Value]:
    """Return the values that the gradient of a root flows through."""
    # views share memory, and a detached one shares no graph: they tell what was written alone
    wanted, shared = {root}, {root.root}
    found = {root}
    for entry in reversed(tape.entries):
        gives = wanted.intersection(entry.made) or entry.written() & shared
        if gives and entry.trains:
            found.update(entry.made)
            wanted.update(entry.reads)
            shared.update(value.root for value in entry.reads)
    return found | {value for value in wanted if value.is_spent}
