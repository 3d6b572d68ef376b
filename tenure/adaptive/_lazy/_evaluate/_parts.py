"""Running what was recorded in parts, for its gradients or its values.

Invariant: what can't be split is refused by name, with everything as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._errors import OutOfRetriesError, SplitMismatchError
from tenure._oom import OomInfo, oom_info

from ..._decorators import PLAIN, Piece, run_pieces
from ..._ranks import has_other_ranks
from ..._step import IsolatedGradients, leaves_of
from .._split import NotSplittableError, Program, SplitPlan, plan_of
from .._tape import Leaf, Reached, Tape, cut_off, has_graph, plain_tensors
from ._refusals import mismatch_error, refusal, tail_error, values_error
from ._remembered import is_unknown, place_of, remembered_values, remembered_whole
from ._whole import begin, start_over


def root_of(tape: Tape, number: int, meta: Any) -> int | None:
    """What a split for a value starts from: a loss, for its gradients come with it."""
    is_loss = meta.requires_grad and meta.dtype.is_floating_point and math.prod(meta.shape) == 1
    return number if is_loss and _trains(tape) else None


def _trains(tape: Tape) -> bool:
    """Whether anything gets gradients: what a backward pass has used up is data by now."""
    plains = (tensor for entry in tape.entries for tensor, _ in entry.plains)
    return any(t.requires_grad for t in (*plains, *(leaf.value for leaf in tape.leaves.values())))


def is_splittable(tape: Tape, number: int, meta: Any) -> bool:
    """Whether what a value is made of can be split."""
    try:
        plan_for(tape, root_of(tape, number, meta))
    except NotSplittableError:
        return False
    return True


def plan_for(tape: Tape, root: int | None) -> SplitPlan:
    """Plan how to split what was recorded.

    Raises:
        NotSplittableError: it has to run whole.
    """
    if has_other_ranks():
        raise NotSplittableError(
            "other processes take part in it, and would wait for one that splits differently"
        )
    return plan_of(tape, root)


def is_to_be_predicted(tape: Tape, number: int, meta: Any) -> bool:
    """Whether a loss is new, so that a prediction is to say what size it begins with."""
    return (
        tape.predicts
        and root_of(tape, number, meta) is not None
        and not any(entry.is_done for entry in tape.entries)
        and is_unknown(tape)
        and is_splittable(tape, number, meta)
    )


def note_split(tape: Tape, root: int | None, info: OomInfo) -> None:
    """What did not fit whole is split from now on.

    Raises:
        BatchCoupledError: it mixes samples.
        OutOfRetriesError: it can't be split for another reason.
    """
    try:
        plan_for(tape, root)
    except NotSplittableError as error:
        raise refusal(tape, error) from None
    remembered_whole(tape).new().note_failed(tape.n_samples, 1, info.device, None)


def values_in_parts(tape: Tape) -> dict[int, Tensor]:
    """Run it without gradients; the values that somebody has."""
    with _undone_where_it_fails(tape):
        program = Program(tape, plan_for(tape, None), None, tape.leaves)
        piece = Piece(program.piece, 0, tuple(tape.generators.values()), {})
        try:
            run_pieces(
                "lazy", piece, tape.n_samples, initial=max(1, -(-tape.n_samples // 2)),
                options=replace(PLAIN, restore_rng=True), remembered=remembered_values(tape),
            )  # fmt: skip
            program.finish()
        except Exception as error:
            if not isinstance(error, OutOfRetriesError) and oom_info(error) is None:
                raise
            told = values_error(tape, program, error)
            # an error that is raised from itself is a cycle, with all that its frames hold
            if told is None:
                raise
            raise told from error
    return program.values


@contextmanager
def _undone_where_it_fails(tape: Tape) -> Iterator[None]:
    """A block after whose failure all is as before the first call ran, whatever ran once in it."""
    begin(tape)
    try:
        yield
    except BaseException:
        start_over(tape)
        raise


def leaves_in(tape: Tape) -> list[Tensor]:
    """The tensors that may get gradients."""
    plains = [t for e in tape.entries for t in plain_tensors((e.args, e.kwargs))]
    found = [
        t for t in (*plains, *(leaf.value for leaf in tape.leaves.values())) if t.requires_grad
    ]
    return leaves_of(found)


def in_parts(
    tape: Tape, number: int, leaves: Mapping[int, Leaf] | None = None, *, predict: bool
) -> dict[int, Tensor]:
    """Run it backward; the values that somebody has.

    Args:
        tape: what was recorded.
        number: the loss.
        leaves: what it begins with, in place of its own leaves.
        predict: whether to begin with the size that is predicted to fit, if none is known.
    """
    with _undone_where_it_fails(tape), torch.enable_grad():
        leaves = tape.leaves if leaves is None else leaves
        program = Program(tape, plan_for(tape, number), number, leaves)
        try:
            result = program.step(place_of(tape), predict=predict and tape.predicts)
        except OutOfRetriesError as error:
            told = tail_error(tape, program.plan, error)
            if told is None:
                raise
            raise told from error
        except SplitMismatchError as error:
            raise mismatch_error(tape, error) from error
    record = remembered_whole(tape).new()
    # there is more memory than there was, or it was predicted
    if result.micro_batch == tape.n_samples:
        record.note_ok(tape.n_samples, None, None)
    elif record.bad is None:
        record.note_failed(tape.n_samples, 1, tape.kind, None)
    return program.values


def keep(tape: Tape, values: dict[int, Tensor]) -> None:
    """These are its values now, of parts that all ran."""
    tape.values.update(values)
    for entry in tape.entries:
        entry.is_done = True
    tape.is_split = True
    tape.tidy()


def gradients_in_parts(
    tape: Tape, number: int, *, predict: bool
) -> tuple[Waiting, dict[int, Tensor]]:
    """The gradients of a loss, which nobody sees yet, and the values that somebody has."""
    cut = {n: cut_off(leaf) for n, leaf in tape.leaves.items()}
    reached = {n: leaf for n, leaf in tape.leaves.items() if has_graph(leaf)}
    isolated = IsolatedGradients([*leaves_in(tape), *(cut[n].value for n in reached)])
    isolated.begin()
    hooked = leaves_of(leaf.value for leaf in reached.values())
    isolated.hold_hooks(hooked)
    try:
        values = in_parts(tape, number, cut, predict=predict)
        found = isolated.new()
    finally:
        isolated.undo()
    new = {id(leaf): gradient for leaf, gradient in found}
    behind = [
        (leaf.value, new.pop(id(cut[n].value)))
        for n, leaf in reached.items()
        if id(cut[n].value) in new
    ]
    rest = [(leaf, gradient) for leaf, gradient in found if id(leaf) in new]
    return Waiting(number, rest, behind, hooked), values


class Waiting(NamedTuple):
    """Gradients that nobody has asked for yet.

    Attributes:
        number: the loss that they are of.
        leaves: leaves, and their gradients.
        reached: tensors that came with a graph, and theirs.
        hooked: the leaves of those graphs, whose hooks wait for the rest of their gradients.
    """

    number: int
    leaves: list[tuple[Tensor, Tensor]]
    reached: list[Reached]
    hooked: list[Tensor]
