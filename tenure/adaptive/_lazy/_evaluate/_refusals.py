"""Errors for what does not fit, in micro-batches either: which call is why, and what to do.

Invariant: when one is raised, all is as before.
"""

from __future__ import annotations

from tenure._errors import BatchCoupledError, OutOfRetriesError, SplitMismatchError
from tenure._oom import oom_info
from tenure._text import format_bytes

from ..._attempt import free_bytes_of
from .._split import NotSplittableError, Program, SplitPlan, described, mixing_call
from .._tape import Tape

_MIXING = (
    "Pass a smaller batch; freeze a normalization with eval(), or accept statistics of each "
    'micro-batch with step(..., batchnorm="per_chunk"); compute a loss that compares samples of '
    "smaller outputs, or with step(..., loss=...)."
)


def refusal(tape: Tape, error: NotSplittableError) -> Exception:
    """The error for what did not fit whole, and can't be split."""
    text = (
        f"What was recorded of {tape.n_samples} samples ran out of memory, and can't be split: "
        f"{error}. Nothing was changed. "
    )
    if error.mixing is not None:
        return BatchCoupledError(text + _MIXING, (error.mixing,))
    advice = "Pass a smaller batch, or say with step() what to do."
    return OutOfRetriesError(text + advice, (tape.n_samples,))


def tail_error(tape: Tape, plan: SplitPlan, error: OutOfRetriesError) -> Exception | None:
    """The error for a split that did not fit at any size, because a part of it runs whole.

    None where that is not why.
    """
    call = mixing_call(plan.tail)
    if not plan.taken or call is None:
        return None
    text = (
        f"What was recorded of {tape.n_samples} samples ran out of memory, whole and in "
        f"micro-batches: {described(call)} wants all samples ({call.verdict.why}), so what is "
        "computed from there on has to fit as a whole, forward and backward. Nothing was changed. "
        f"{_MIXING}"
    )
    return BatchCoupledError(text, (described(call),))


def values_error(tape: Tape, program: Program, error: Exception) -> Exception | None:
    """The error for values that did not fit at any size; None where ``error`` says it."""
    call = mixing_call(program.plan.others)
    if not isinstance(error, OutOfRetriesError) and call is not None:
        why = (
            f"{described(call)} wants all samples ({call.verdict.why}), and does not fit as a whole"
        )
        text = f"The values of {tape.n_samples} samples ran out of memory: {why}"
        return BatchCoupledError(f"{text}. Nothing was changed. {_MIXING}", (described(call),))
    if not isinstance(error, OutOfRetriesError):
        info, free_bytes = oom_info(error), None
    else:
        program.let_go()
        info = error.info
        free_bytes = None if info is None else free_bytes_of(info)
    n_bytes, shapes = program.wanted_bytes()
    if isinstance(error, OutOfRetriesError) and (free_bytes is None or n_bytes < free_bytes):
        return None
    free = "" if free_bytes is None else f", and {format_bytes(free_bytes)} is free"
    text = (
        f"The results do not fit: {shapes}, which were asked for, have a name still or are wanted "
        f"whole by a call, take {format_bytes(n_bytes)}{free}. Micro-batches make smaller what "
        "they are computed of, and not the results. Nothing was changed. Let go of what you don't "
        "need, record what makes it smaller, such as argmax() or cpu(), or pass a part of the "
        "batch at a time."
    )
    return OutOfRetriesError(text, (tape.n_samples,), info)


def mismatch_error(tape: Tape, error: SplitMismatchError) -> Exception:
    """The error for a split that gave something else, which rules out that it is right."""
    advice = (
        "lazy() takes one of the calls for what it is not: use step() for this program, or compute "
        "value() of what it is made of first."
    )
    text = (
        f"What was recorded of {tape.n_samples} samples does not fit, and would give other results "
        f"in micro-batches, as a few samples show: {error.whole:.6g} in one piece and "
        f"{error.split:.6g} in parts. Nothing was changed. {advice}"
    )
    return SplitMismatchError(text, error.whole, error.split, advice)
