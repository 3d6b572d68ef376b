"""How a recorded program is split: three stages, each of which reads what those before it gave.

Before: made of the batch alone, run once on all of it. Parts: run on each part of the batch, with
the terms of the loss, which are means or sums over samples. Whole: run once, on what the others
give. Invariant: a plan gives what the recorded program gives, or there is none, and an error says
which call is why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ._meta import names
from ._tape import RecordedCall, Tape, Value, inputs_of, makers_of
from ._terms import reads_of_count
from ._trial import NotSplittableError, judge

_BEFORE, _PARTS, _WHOLE = range(3)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How to split it.

    Attributes:
        root: the loss; None: only values are wanted.
        before: the calls that run first, on the whole batch.
        chunk: those that run on each part, in order; with the terms.
        tail: those from there to the root, on the whole batch.
        others: the remaining ones: values wanted later are made by them.
        terms: the calls that give the terms of the root, by what they give.
        taken: if there are no terms: what the tail takes of all parts.
    """

    root: Value | None
    before: list[RecordedCall]
    chunk: list[RecordedCall]
    tail: list[RecordedCall]
    others: list[RecordedCall]
    terms: dict[Value, RecordedCall]
    taken: list[Value]


def plan_of(tape: Tape, entries: list[RecordedCall], root: Value | None) -> SplitPlan:
    """Plan a split.

    Args:
        tape: what was recorded.
        entries: the calls that are wanted.
        root: the loss; None: only values are wanted.

    Raises:
        NotSplittableError: it has to run whole.
    """
    if tape.coupled is not None:
        raise NotSplittableError(tape.coupled)
    judge(tape, entries)
    stages = _stages(entries)
    _refuse_writes(entries, stages)
    before, chunk, whole = ([e for e in entries if stages[e] == s] for s in range(3))
    tail = [] if root is None else makers_of(whole, [root])
    others = [entry for entry in whole if entry not in tail]
    made = {value for entry in chunk for value in entry.made}
    takes = made | {v for v in inputs_of(entries) if v.meta.requires_grad}
    terms = {entry.made[0]: entry for entry in tail if entry.verdict.kind == "term"}
    after = [entry for entry in tail if entry.verdict.kind != "term"]
    taken: list[Value] = []
    if terms and not _taken(after, takes, root):
        chunk, tail = [*chunk, *terms.values()], after
    elif root is not None:
        # terms are a part of the tail if that takes more than them
        terms, taken = {}, _taken(tail, takes, root)
        if not made.intersection(taken):
            blame = next((entry for entry in tail if entry.verdict.why), None)
            if blame is not None:
                raise NotSplittableError(f"{blame}: {blame.verdict.why}", str(blame))
            chunk = []
    if not chunk:
        raise NotSplittableError("nothing in it runs on one sample at a time")
    return SplitPlan(root, before, chunk, tail, others, terms, taken)


def mixing_call(entries: Iterable[RecordedCall]) -> RecordedCall | None:
    """Return the first of some calls that wants all samples, if one does."""
    kinds = "tail", "before"
    return next((e for e in entries if e.verdict.kind in kinds and e.verdict.why), None)


def _stages(entries: list[RecordedCall]) -> dict[RecordedCall, int]:
    """Say when each call runs."""
    alone = {entry for entry in entries if entry.is_data}
    # counted before anything runs, so that one pass is enough
    counted = {v for e in entries if e.verdict.kind == "term" for v in reads_of_count(e)}
    first = {e for e in alone if e.verdict.kind != "chunk" or counted.intersection(e.made)}
    # what is written in place is written by one stage
    rewritten = {root for entry in alone for root in entry.written()}
    more = first
    while more:
        wanted = {value for entry in first for value in entry.reads}
        shared = rewritten & {root for entry in first for root in entry.touched()}
        more = {e for e in alone - first if wanted & {*e.made} or shared & e.touched()}
        first |= more
    return {
        e: _BEFORE if e in first else _PARTS if e.verdict.kind == "chunk" else _WHOLE
        for e in entries
    }


def _refuse_writes(entries: list[RecordedCall], stages: dict[RecordedCall, int]) -> None:
    """Make sure that the order of the stages changes nothing that is written in place.

    Each stage has memory of its own: a write reaches nobody who has taken a part, or the whole, at
    another stage before; and nobody takes what a later stage is to write.
    """
    touched: dict[Value, set[int]] = {}
    last_write: dict[Value, int] = {}
    for entry in entries:
        stage, written = stages[entry], entry.written()
        for root in entry.touched():
            before = touched.setdefault(root, set())
            if (root in written and before - {stage}) or last_write.get(root, stage) > stage:
                raise NotSplittableError(
                    f"{entry} uses a tensor that is written in place, and of which "
                    "parts and the whole are used: clone() it first"
                )
            before.add(stage)
            if root in written:
                last_write[root] = stage


def _taken(entries: list[RecordedCall], made: set[Value], root: Value | None) -> list[Value]:
    """Return what some calls, and the root, take of what was made before them."""
    reads = [value for entry in entries for value in entry.reads]
    return list(dict.fromkeys(v for v in (*reads, root) if v is not None and v in made))


_LINEAR = frozenset(
    names(
        """
        add sub rsub neg mul div true_divide __add__ __radd__ __sub__ __rsub__ __neg__
        __mul__ __rmul__ __truediv__ float double half bfloat16 to clone reshape view
        squeeze sum mean contiguous __iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_
        div_ type_as flatten
        """
    )
)


def is_linear(tail: list[RecordedCall], terms: Iterable[Value]) -> bool:
    """Tell whether the last calls may only add terms up, and multiply them by constants."""
    depend = set(terms)
    for entry in tail:
        if depend.intersection(entry.reads):
            if getattr(entry.func, "__name__", "") not in _LINEAR:
                return False
            depend.update(entry.made)
    return True
