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
from ._tape import RecordedCall, Tape, makers_of
from ._terms import reads_of_count
from ._trial import NotSplittableError, judge, of_data

_BEFORE, _PARTS, _WHOLE = range(3)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How to split it.

    Attributes:
        before: the calls that run first, on the whole batch.
        chunk: those that run on each part, in order; with the terms.
        tail: those from there to the root, on the whole batch.
        others: the remaining ones: values wanted later are made by them.
        terms: the calls that give the terms of the root, by number.
        taken: if there are no terms: what the tail takes of all parts.
        written_first: the leaves that the first calls write into.
        written: the leaves that parts write into, each into its own copy.
    """

    before: list[RecordedCall]
    chunk: list[RecordedCall]
    tail: list[RecordedCall]
    others: list[RecordedCall]
    terms: dict[int, RecordedCall]
    taken: list[int]
    written_first: frozenset[int]
    written: frozenset[int]


def plan_of(tape: Tape, root: int | None) -> SplitPlan:
    """Plan a split.

    Args:
        tape: what was recorded.
        root: the number of the loss; None: only values are wanted.

    Raises:
        NotSplittableError: it has to run whole.
    """
    if tape.coupled is not None:
        raise NotSplittableError(tape.coupled)
    judge(tape)
    stages = _stages(tape)
    _refuse_writes(tape, stages)
    before, chunk, whole = ([e for e in tape.entries if stages[e] == s] for s in range(3))
    written_first, written = (
        frozenset(tape.leaves.keys() & {g for e in calls for g in e.written(tape.views)})
        for calls in (before, chunk)
    )
    tail = [] if root is None else makers_of(whole, [root], tape.views)
    others = [entry for entry in whole if entry not in tail]
    made = {n for entry in chunk for n in entry.made} | written
    takes = made | {n for n, leaf in tape.leaves.items() if leaf.value.requires_grad}
    terms = {entry.made[0]: entry for entry in tail if entry.verdict.kind == "term"}
    after = [entry for entry in tail if entry.verdict.kind != "term"]
    taken: list[int] = []
    if terms and not _taken(after, takes, root):
        chunk, tail = [*chunk, *terms.values()], after
    elif root is not None:
        # terms are a part of the tail if that takes more than them
        terms, taken = {}, _taken(tail, takes, root)
        if not made.intersection(taken):
            blame = next((entry for entry in tail if entry.verdict.why), None)
            if blame is not None:
                why = f"{described(blame)}: {blame.verdict.why}"
                raise NotSplittableError(why, described(blame))
            chunk = []
    if not chunk:
        raise NotSplittableError("nothing in it runs on one sample at a time")
    return SplitPlan(before, chunk, tail, others, terms, taken, written_first, written)


def mixing_call(entries: Iterable[RecordedCall]) -> RecordedCall | None:
    """Return the first of some calls that wants all samples, if one does."""
    return next((e for e in entries if e.verdict.kind == "tail" and e.verdict.why), None)


def described(entry: RecordedCall) -> str:
    """Return a call by name and place."""
    name = getattr(entry.func, "__name__", str(entry.func))
    where = f" at {entry.site}" if entry.site is not None else ""
    return f"{name}(){where}"


def _stages(tape: Tape) -> dict[RecordedCall, int]:
    """Say when each call runs."""
    alone, views = of_data(tape), tape.views
    # counted before anything runs, so that one pass is enough
    counted = {n for e in tape.entries if e.verdict.kind == "term" for n in reads_of_count(e)}
    first = {e for e in alone if e.verdict.kind != "chunk" or counted.intersection(e.made)}
    # what is written in place is written by one stage
    rewritten = {group for entry in alone for group in entry.written(views)}
    more = first
    while more:
        wanted = {n for entry in first for n in entry.reads}
        shared = rewritten & {group for entry in first for group in entry.touched(views)}
        more = {e for e in alone - first if wanted & {*e.made} or shared & e.touched(views)}
        first |= more
    return {
        e: _BEFORE if e in first else _PARTS if e.verdict.kind == "chunk" else _WHOLE
        for e in tape.entries
    }


def _refuse_writes(tape: Tape, stages: dict[RecordedCall, int]) -> None:
    """Make sure that the order of the stages changes nothing that is written in place.

    Each stage has memory of its own: a write reaches nobody who has taken a part, or the whole, at
    another stage before; and nobody takes what a later stage is to write.
    """
    views = tape.views
    touched: dict[int, set[int]] = {}
    last_write: dict[int, int] = {}
    for entry in tape.entries:
        stage, written = stages[entry], entry.written(views)
        for group in entry.touched(views):
            before = touched.setdefault(group, set())
            is_late = group in written and (
                bool(before - {stage}) or (stage == _WHOLE and group in tape.leaves)
            )
            if is_late or last_write.get(group, stage) > stage:
                raise NotSplittableError(
                    f"{described(entry)} uses a tensor that is written in place, and of which "
                    "parts and the whole are used: clone() it first"
                )
            before.add(stage)
            if group in written:
                last_write[group] = stage


def _taken(entries: list[RecordedCall], made: set[int], root: int | None) -> list[int]:
    """Return what some calls, and the root, take of what was made before them."""
    reads = [n for entry in entries for n in entry.reads]
    return list(dict.fromkeys(n for n in (*reads, root) if n is not None and n in made))


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


def is_linear(tail: list[RecordedCall], terms: Iterable[int]) -> bool:
    """Tell whether the last calls may only add terms up, and multiply them by constants."""
    depend = set(terms)
    for entry in tail:
        if depend.intersection(entry.reads):
            if getattr(entry.func, "__name__", "") not in _LINEAR:
                return False
            depend.update(entry.made)
    return True
