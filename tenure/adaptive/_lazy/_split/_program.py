"""The recorded program on a part of the batch, or on all of it.

Invariant: a part gets its own samples of what has samples, and all of what they share; the user's
own tensors are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tenure._errors import OutOfRetriesError
from tenure._storages import storage_key

from .._label import Label
from .._tape import Entry, Leaf, Replayed, Tape, check_unwritten, has_graph, replayed, run
from ._gathered import sample_dim, with_samples_apart, with_samples_back
from ._once import run_before, run_late
from ._split_plan import SplitPlan

_UNTRIED = (
    "What was recorded does not fit whole, and two samples of it ran out of memory where it was "
    "tried whether it can be split. Nothing was changed. Pass smaller samples, or use step()."
)


class Program:
    """What was recorded, as it runs on parts.

    Args:
        tape: what was recorded.
        plan: how to split it.
        labels: where the values have their samples, by number.
        leaves: what it begins with; cut off the graphs that they came with.

    Attributes:
        tape: what was recorded.
        plan: how it is split.
        labels: where the values have their samples, by number.
        data: what parts are made of, by number: leaves, and what is made of the batch alone.
        kept: the values of parts that are kept: somebody has them, or has what is made of them.
    """

    def __init__(
        self,
        tape: Tape,
        plan: SplitPlan,
        labels: Mapping[int, Label],
        leaves: Mapping[int, Leaf],
    ) -> None:
        self.tape, self.plan, self.labels = tape, plan, labels
        check_unwritten(tape.entries, tape.leaves)
        self.data = run_before(tape, plan, labels, leaves)
        self.kept = self._wanted()
        self._numbers = list(self.data)
        self._chunk = replayed(plan.chunk, [*self.kept, *plan.terms, *plan.frontier])
        self._before = {
            n: leaf.value for n, leaf in self.data.items()
            if n in tape.handles and (n not in tape.leaves or n in plan.written_first)
        }  # fmt: skip

    def run_chunk(
        self,
        env: dict[int, Any],
        length: int,
        *,
        done: Callable[[Entry], None] | None = None,
    ) -> None:
        """Run what runs on each part; ``done`` is called after each call."""
        self.run(self._chunk, env, length, done=done)
        if self.tape.is_untried:
            raise OutOfRetriesError(_UNTRIED, (self.tape.n_samples,))

    def run(
        self,
        what: Replayed,
        env: dict[int, Any],
        length: int | None = None,
        *,
        done: Callable[[Entry], None] | None = None,
    ) -> None:
        """Run some of its calls.

        Args:
            what: the calls.
            env: values by number; gets those that are computed.
            length: how many samples there are; None: all.
            done: called after each call.
        """
        # step() says whether graphs are wanted: a verification and the first of two passes are
        # without, and have memory for none
        run(
            what, env, self.tape.kind, length, others=self.data, done=done,
            graphs=torch.is_grad_enabled(),
        )  # fmt: skip

    def late(self, entries: list[Entry], env: dict[int, Any]) -> dict[int, Tensor]:
        """The values that somebody has of calls that want all samples, and of those before all."""
        return run_late(entries, env, self.tape, self.data) | self._before

    def batch(self) -> tuple[list[Tensor], list[int | None]]:
        """What parts are cut from, and the dimension of each that has the samples, if one does."""
        cut = [self._cut(number) for number in self._numbers]
        return [value for value, _ in cut], [dim for _, dim in cut]

    def part(self, start: int, end: int) -> list[Tensor]:
        """The batch of some samples."""
        return [
            value if dim is None else value.narrow(dim, start, end - start)
            for value, dim in zip(*self.batch(), strict=True)
        ]

    def env(self, batch: list[Tensor]) -> tuple[dict[int, Any], int]:
        """Values by number, as calls on a batch like that of `batch` get them; how many samples."""
        env, length = {}, self.tape.n_samples
        for number, piece in zip(self._numbers, batch, strict=False):
            leaf = self.data[number]
            label, dim = leaf.label, sample_dim(leaf.label)
            if dim is not None:
                length = piece.shape[dim]
                piece = with_samples_back(piece, label)
                # a part along a later dimension has gaps, and can't be viewed in all shapes
                if label.dim and leaf.value.is_contiguous():
                    piece = piece.contiguous()
            # no leaf itself, as what it stands for is none: autocast keeps what it casts of leaves
            if piece.requires_grad and has_graph(self.tape.leaves[number]):
                piece = piece.view_as(piece)
            # the user's own tensor is not written: the recorded one is
            env[number] = piece.clone() if number in self.plan.written else piece
        return env, length

    def start_of(self, batch: list[Tensor]) -> int | None:
        """Where a part of the batch begins; None for other samples than those of the batch."""
        # what only looks (a verification) runs without gradients, or on copies
        if not torch.is_grad_enabled():
            return None
        for number, piece in zip(self._numbers, batch, strict=False):
            whole, dim = self._cut(number)
            if dim is None:
                continue
            if whole.stride(dim) and storage_key(piece) == storage_key(whole):
                past = int(piece.storage_offset()) - int(whole.storage_offset())
                return past // whole.stride(dim)
            if whole.stride(dim):
                return None
        return None

    def _cut(self, number: int) -> tuple[Tensor, int | None]:
        leaf = self.data[number]
        return with_samples_apart(leaf.value, leaf.label), sample_dim(leaf.label)

    def _wanted(self) -> list[int]:
        """The values of parts that are kept: somebody has them, or has what is made of them."""
        plan, tape = self.plan, self.tape
        made = {n for e in plan.chunk if e.verdict.kind == "chunk" for n in e.made} | plan.written
        wanted = {n for n in made if n in tape.handles}
        late = plan.others if plan.terms or plan.frontier else [*plan.tail, *plan.others]
        # statistics are written whether or not anybody has what comes of it
        needed = {n for e in late for n in e.made if n in tape.handles or e.shape.writes_plain}
        for entry in reversed(late):
            if any(n in needed for n in entry.outs if n is not None):
                needed.update(entry.reads)
        found: list[int] = sorted(wanted | (needed & made))
        return [n for n in found if n not in plan.frontier] if plan.frontier else found
