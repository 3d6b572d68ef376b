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
from .._memory import meter_for
from .._ranks import has_other_ranks
from .._sizes import RememberedCall
from .._step import IsolatedGradients, leaves_of
from ._plan import SplitPlan, described, mixing_call, plan_of
from ._program import RecordedProgram
from ._tape import Tape
from ._trial import NotSplittableError

_MANY = 1024
Gradients = list[tuple[Tensor, Tensor]]
"""Leaves, and what a backward pass gives each."""
_MIXING = (
    "Nothing was changed. Pass a smaller batch; freeze a normalization with eval(), or accept "
    'statistics of each micro-batch with step(..., batchnorm="per_chunk"); compute a loss that '
    "compares samples of smaller outputs, or with step(..., loss=...)."
)
# By their hash: a program that is known here must not hold the functions that it calls.
_places: dict[int, str] = {}


def _place_of(tape: Tape) -> str:
    """Return what stands for the program, whatever the number of samples."""
    functions = tuple([entry.func for entry in tape.entries])
    key = hash(functions)
    if key not in _places:
        if len(_places) >= _MANY:
            _places.clear()
        names = " ".join(getattr(each, "__name__", "") for each in functions)
        _places[key] = hashlib.blake2s(names.encode(), digest_size=8).hexdigest()
    return _places[key]


def _remembered(tape: Tape, what: str) -> RememberedCall:
    # it holds this frame: a local of who uses it would be a cycle, with all that is recorded
    return RememberedCall(None, sys._getframe(), (f"lazy {what}", _place_of(tape)), None, (), {})


def root_of(tape: Tape, number: int, meta: Any) -> int | None:
    """Return what a split for a value starts from: a loss, for its gradients come with it."""
    is_loss = meta.requires_grad and meta.dtype.is_floating_point and math.prod(meta.shape) == 1
    return number if is_loss and leaves_in(tape) else None


def leaves_in(tape: Tape) -> list[Tensor]:
    """Return the tensors that may get gradients."""
    plains = (tensor for entry in tape.entries for tensor in entry.tensors)
    found = (*plains, *(leaf.value for leaf in tape.leaves.values()))
    return leaves_of(tensor for tensor in found if tensor.requires_grad)


def origins_in(tape: Tape) -> list[Tensor]:
    """Return the tensors that came with a graph."""
    return [leaf.origin for leaf in tape.leaves.values() if leaf.origin is not None]


def _plan_for(tape: Tape, root: int | None) -> SplitPlan:
    if has_other_ranks():
        raise NotSplittableError(
            "other processes take part in it, and would wait for one that splits differently"
        )
    return plan_of(tape, root)


def _is_splittable(tape: Tape, number: int, meta: Any) -> bool:
    try:
        _plan_for(tape, root_of(tape, number, meta))
    except NotSplittableError:
        return False
    return True


def is_known_to_fail(tape: Tape, number: int, meta: Any) -> bool:
    """Tell whether so many samples are known not to fit, and can be split."""
    record = _remembered(tape, "whole").known()
    fails = record is not None and record.bad is not None and tape.n_samples >= record.bad
    return fails and _is_splittable(tape, number, meta)


def is_predicted(tape: Tape, number: int, meta: Any) -> bool:
    """Tell whether a loss is new, so that a prediction is to say what size it begins with."""
    if not tape.predicts or any(entry.is_done for entry in tape.entries):
        return False
    record = _remembered(tape, "whole").known()
    if record is not None and (record.bad is not None or record.ok >= tape.n_samples):
        return False
    devices = {str(leaf.value.device) for leaf in tape.leaves.values()}
    meters = [meter_for(device) for device in devices if device != "meta"]
    return (
        any(meter is not None and meter.measures for meter in meters)
        and root_of(tape, number, meta) is not None
        and _is_splittable(tape, number, meta)
    )


def note_split(tape: Tape, root: int | None, info: OomInfo) -> None:
    """Note that what did not fit whole is split from now on.

    Raises:
        BatchCoupledError: it mixes samples.
        OutOfRetriesError: it can't be split for another reason.
    """
    try:
        _plan_for(tape, root)
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


def keep(tape: Tape, values: dict[int, Tensor]) -> None:
    """Take the values of parts that all ran."""
    tape.values.update(values)
    for entry in tape.entries:
        entry.is_done = True
    tape.is_split = True
    tape.tidy()


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


def gradients_in_parts(tape: Tape, number: int, *, predict: bool) -> Gradients:
    """Run a loss backward in micro-batches."""
    with torch.enable_grad():
        program = RecordedProgram(tape, _plan_for(tape, number), number)
        try:
            with collecting(tape) as isolated:
                result = program.step(_place_of(tape), predict=predict and tape.predicts)
                found = isolated.new()
        except OutOfRetriesError as error:
            call = mixing_call(program.plan.tail) if program.plan.taken else None
            if call is None:
                raise
            raise _coupled(tape, call) from error
        except SplitMismatchError as error:
            raise _mismatch(tape, error) from error
    record = _remembered(tape, "whole").new()
    # there is more memory than there was, or it was predicted
    if result.micro_batch == tape.n_samples:
        record.ran(tape.n_samples)
    elif record.bad is None:
        record.ran_out(tape.n_samples, 1, tape.kind)
    keep(tape, program.values)
    return found


def values_in_parts(tape: Tape) -> dict[int, Tensor]:
    """Run it without gradients; the values that somebody has."""
    program = RecordedProgram(tape, _plan_for(tape, None), None)
    piece = RangePart(program.piece, 0, tuple(tape.generators.values()), {})
    try:
        run_pieces(
            "lazy", piece, tape.n_samples, initial=max(1, -(-tape.n_samples // 2)),
            options=replace(PLAIN, restore_rng=True), remembered=_remembered(tape, "values"),
        )  # fmt: skip
        program.finish()
    except Exception as error:
        info = error.info if isinstance(error, OutOfRetriesError) else oom_info(error)
        if info is None:
            raise
        call = mixing_call(program.plan.others)
        if call is not None and not isinstance(error, OutOfRetriesError):
            raise _coupled(tape, call) from error
        raise OutOfRetriesError(
            f"The results do not fit: {program.wanted()}, which were asked for, have a name still "
            "or are wanted whole by a call. Micro-batches make smaller what they are computed of, "
            "and not the results. Nothing was changed. Let go of what you don't need, record what "
            "makes it smaller, such as argmax() or cpu(), or pass a part of the batch at a time.",
            (tape.n_samples,), info,
        ) from error  # fmt: skip
    return program.values


def _coupled(tape: Tape, call: Any) -> BatchCoupledError:
    return BatchCoupledError(
        f"What was recorded of {tape.n_samples} samples ran out of memory, whole and in "
        f"micro-batches: {described(call)} wants all samples ({call.verdict.why}), so what is "
        f"computed from there on has to fit as a whole. {_MIXING}",
        (described(call),),
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
