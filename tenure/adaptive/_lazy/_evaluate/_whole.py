"""Running what was recorded on all samples at once.

Invariant: where it fails, everything is as if nothing had run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tenure._oom import OomInfo, oom_of_work
from tenure.scopes import persist

from ..._attempt import release
from ..._undo import RngState
from .._tape import Entry, Tape, check_unwritten, replayed, run, written_by
from ._used import consume


class _Start:
    """What running changes besides values, as it was before the first call ran."""

    def __init__(self, tape: Tape) -> None:
        self._generators = dict(tape.generators)
        devices = () if tape.kind == "cpu" else _devices(tape)
        self._rng = RngState(devices, self._generators.values())
        self._rng.begin()
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._note_buffers(tape.entries)

    def note(self, tape: Tape) -> None:
        """Note what calls that wait will change besides."""
        new = {i: each for i, each in tape.generators.items() if i not in self._generators}
        self._generators |= new
        self._rng.add(new.values())
        self._note_buffers(tape.pending())

    def _note_buffers(self, entries: list[Entry]) -> None:
        for tensor in written_by(entries):
            if id(tensor) not in self._buffers:
                with torch.no_grad(), persist():
                    self._buffers[id(tensor)] = (tensor, tensor.clone())

    def undo(self) -> None:
        """Bring it back."""
        self._rng.undo()
        with torch.no_grad():
            for tensor, before in self._buffers.values():
                tensor.copy_(before)


def _devices(tape: Tape) -> list[torch.device]:
    return list({leaf.value.device for leaf in tape.leaves.values()})


def begin(tape: Tape) -> None:
    """Note what running changes, before any call runs that has not run."""
    if tape.rng is None:
        tape.rng = _Start(tape)
    else:
        tape.rng.note(tape)


def run_whole(tape: Tape) -> OomInfo | None:
    """Run what has not run yet on all samples; what ran out of memory, with all as before."""
    pending = tape.pending()
    check_unwritten(pending, tape.leaves)
    outside = sys.exception()
    begin(tape)
    env: dict[int, Any] = tape.values
    leaves = tape.given()
    for number in tape.written:
        if number not in env:
            with persist():
                env[number] = leaves[number].value.clone()
    what = replayed(pending, [*tape.handles, *env])
    try:
        with persist():
            run(what, env, tape.kind, others=leaves)
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
        consume_if_done(tape)
        return None
    release(failure, outside)
    del failure
    start_over(tape)
    return info


def start_over(tape: Tape) -> None:
    """As if nothing had run."""
    tape.values.clear()
    tape.proxies.clear()
    for entry in tape.entries:
        entry.is_done = False
    tape.is_split = tape.is_joined = False
    if tape.rng is not None:
        tape.rng.undo()
        tape.rng = None


def join(tape: Tape) -> None:
    """From now on values are of one graph with what their leaves came of."""
    if tape.is_split or tape.proxies:
        start_over(tape)
    tape.is_joined = True


def consume_if_done(tape: Tape) -> None:
    """Without a graph nothing will run again."""
    if not any(meta.requires_grad for entry in tape.entries for meta in entry.shape.metas):
        consume(tape)
