"""Running what was recorded in parts, for its gradients or its values.

Invariant: what can't be split is refused by name; who calls brings all back as it was.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tenure._errors import BatchCoupledError, OutOfRetriesError, SplitMismatchError
from tenure._oom import OomInfo, oom_info

from .._decorators import PLAIN, RangePart, run_pieces
from .._ranks import has_other_ranks
from .._sizes import RememberedCall
from .._step import IsolatedGradients, leaves_of
from ._plan import SplitPlan, mixing_call, plan_of
from ._program import RecordedProgram
from ._tape import Tape, Value, inputs_of
from ._trial import NotSplittableError

Gradients = list[tuple[Tensor, Tensor]]
"""Leaves, and what a backward pass gives each."""
_MIXING = (
    "Nothing was changed. Pass a smaller batch; freeze a normalization with eval(), or accept "
    'statistics of each micro-batch with step(..., batchnorm="per_chunk"); compute a loss that '
    "compares samples of smaller outputs, or with step(..., loss=...)."
)


def _place_of(tape: Tape) -> str:
    """Return what stands for the program, whatever the number of samples."""
    calls = " ".join(getattr(entry.func, "__name__", "") for entry in tape.entries)
    return hashlib.blake2s(calls.encode(), digest_size=8).hexdigest()


def _remembered(tape: Tape, what: str) -> RememberedCall:
    # it holds this frame: a local of who uses it would be a cycle, with all that is recorded
    return RememberedCall(None, sys._getframe(), (f"lazy {what}", _place_of(tape)), None, (), {})


def is_loss(tape: Tape, value: Value) -> bool:
    """Tell whether a split for a value gives gradients, too: it is a loss."""
    meta = value.meta
    is_number = meta.dtype.is_floating_point and math.prod(meta.shape) == 1
    return meta.requires_grad and is_number and bool(leaves_in(tape))


def leaves_in(tape: Tape) -> list[Tensor]:
    """Return the tensors that may get gradients."""
    plains = (tensor for entry in tape.entries for tensor in entry.tensors)
    values = (value.tensor for value in inputs_of(tape.entries))
    found = (*plains, *(tensor for tensor in values if tensor is not None))
    return leaves_of(tensor for tensor in found if tensor.requires_grad)


def origins_in(tape: Tape) -> list[Tensor]:
    """Return the tensors that came with a graph."""
    return [v.origin for v in inputs_of(tape.entries) if v.origin is not None]


def _plan_for(tape: Tape, value: Value, *, is_root: bool | None = None) -> SplitPlan:
    if has_other_ranks():
        raise NotSplittableError(
            "other processes take part in it, and would wait for one that splits differently"
        )
    is_root = is_loss(tape, value) if is_root is None else is_root
    return plan_of(tape, tape.wanted(value), value if is_root else None)


def begins_in_parts(tape: Tape, value: Value) -> bool:
    """Tell whether so many samples are known not to fit, and can be split."""
    record = _remembered(tape, "whole").known()
    if record is None or record.bad is None or tape.n_samples < record.bad:
        return False
    try:
        _plan_for(tape, value)
    except NotSplittableError:
        return False
    return True


def note_split(tape: Tape, value: Value, info: OomInfo) -> None:
    """Note that what did not fit whole is split from now on.

    Raises:
        BatchCoupledError: it mixes samples.
        OutOfRetriesError: it can't be split for another reason.
    """
    try:
        _plan_for(tape, value)
    except NotSplittableError as error:
        text = (
            f"What was recorded of {tape.n_samples} samples ran out of memory, and can't be split: "
            f"{error}. "
        )
        if error.mixing is not None:
            raise BatchCoupledError(text + _MIXING, (error.mixing,)) from None
        advice = "Nothing was changed. Pass a smaller batch, or say with step() what to do."
        raise OutOfRetriesError(text + advice, (tape.n_samples,)) from None
    _remembered(tape, "whole").new().ran_out(tape.n_samples, 1, info.device)


@contextmanager
def collecting(tape: Tape) -> Iterator[IsolatedGradients]:
    """Open a block that makes gradients, which nobody sees."""
    isolated = IsolatedGradients(leaves_in(tape))
    isolated.begin()
    # leaves of a graph that a tensor came with get their gradients in two passes
    isolated.hold_hooks(leaves_of(origins_in(tape)))
    try:
        yield isolated
    finally:
        isolated.undo()


def gradients_in_parts(tape: Tape, value: Value) -> Gradients:
    """Run a loss backward in micro-batches."""
    with torch.enable_grad():
        program = RecordedProgram(tape, tape.wanted(value), _plan_for(tape, value, is_root=True))
        with _explained(tape, program), collecting(tape) as isolated:
            result = program.step(_place_of(tape))
            found = isolated.new()
    record = _remembered(tape, "whole").new()
    # there is more memory than there was
    if result.micro_batch == tape.n_samples:
        record.ran(tape.n_samples)
    elif record.bad is None:
        record.ran_out(tape.n_samples, 1, tape.kind)
    program.keep()
    return found


def values_in_parts(tape: Tape, value: Value) -> None:
    """Run it without gradients, for the values that somebody has."""
    program = RecordedProgram(tape, tape.wanted(value), _plan_for(tape, value, is_root=False))
    piece = RangePart(program.piece, 0, tuple(tape.generators.values()), {})
    with _explained(tape, program):
        run_pieces(
            "lazy", piece, tape.n_samples, initial=max(1, -(-tape.n_samples // 2)),
            options=replace(PLAIN, restore_rng=True), remembered=_remembered(tape, "values"),
        )  # fmt: skip
        program.finish()
    program.keep()


@contextmanager
def _explained(tape: Tape, program: RecordedProgram) -> Iterator[None]:
    """Say what in a program is the reason that its parts do not fit, or are not the whole."""
    plan = program.plan
    try:
        yield
    except SplitMismatchError as error:
        raise _mismatch(tape, error) from error
    except OutOfRetriesError as error:
        if plan.root is None:
            raise _too_large(tape, program, error.info) from error
        if plan.taken and (call := mixing_call([*plan.before, *plan.tail])) is not None:
            raise _coupled(tape, call) from error
        if not program.keeps:
            raise
        raise OutOfRetriesError(
            f"{error} Results that have a name are kept whole beside it: {program.wanted()}. "
            "`del` what you don't need of them.",
            error.sizes, error.info,
        ) from error  # fmt: skip
    except Exception as error:
        info = oom_info(error)
        if info is None:
            raise
        # what is put together of the parts
        if (call := mixing_call(plan.others)) is not None:
            raise _coupled(tape, call) from error
        raise _too_large(tape, program, info) from error


def _too_large(tape: Tape, program: RecordedProgram, info: OomInfo | None) -> OutOfRetriesError:
    return OutOfRetriesError(
        f"The results do not fit: {program.wanted()}, which were asked for, have a name still "
        "or are wanted whole by a call. Micro-batches make smaller what they are computed of, "
        "and not the results. Nothing was changed. Let go of what you don't need, record what "
        "makes it smaller, such as argmax() or cpu(), or pass a part of the batch at a time.",
        (tape.n_samples,), info,
    )  # fmt: skip


def _coupled(tape: Tape, call: Any) -> BatchCoupledError:
    return BatchCoupledError(
        f"What was recorded of {tape.n_samples} samples ran out of memory, whole and in "
        f"micro-batches: {call} wants all samples ({call.verdict.why}), so what is "
        f"computed from there on has to fit as a whole. {_MIXING}",
        (str(call),),
    )


def _mismatch(tape: Tape, error: SplitMismatchError) -> SplitMismatchError:
    advice = (
        "lazy() takes one of the calls for what it is not: use step() for this program, or compute "
        "value() of what it is made of first."
    )
    return SplitMismatchError(
        f"What was recorded of {tape.n_samples} samples does not fit, and would give other results "
        f"in micro-batches, as a few samples show: {error.whole:.6g} in one piece and "
        f"{error.split:.6g} in parts. Nothing was changed. {advice}",
        error.whole, error.split, advice,
    )  # fmt: skip
