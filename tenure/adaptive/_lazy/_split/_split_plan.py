"""How what was recorded is split: what runs on parts of the batch, and what wants all of it.

Each call is of one kind. Before: made of the batch alone, run once on all of it. Chunk: run on each
part. Term: a mean or a sum over the samples. Tail: run once, on what the others give. Invariant: a
plan gives what the recorded program gives, or there is none, and an error says which call is why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .._names import names
from .._tape import Entry, Tape
from ._first import made_first
from ._groups import touched_groups, written_groups
from ._trial import judge


class NotSplittableError(Exception):
    """What was recorded has to run whole; says why, and whether a call mixes the samples."""

    def __init__(self, why: str, mixing: str | None = None) -> None:
        super().__init__(why)
        self.mixing = mixing


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How to split it.

    Attributes:
        before: the calls that run first, on the whole batch.
        chunk: those that run on each part, in order; with the terms.
        terms: the numbers of the terms of the root, and their entries.
        frontier: where there are no terms: what the tail takes of all parts.
        tail: the calls from there to the root.
        is_affine: whether the root is a sum of the terms, each times a constant.
        others: the calls that are none of these: values wanted later are made by them.
        written_first: the leaves that the first calls write into.
        written: the leaves that parts write into, each into its own copy.
    """

    before: list[Entry]
    chunk: list[Entry]
    terms: dict[int, Entry]
    frontier: list[int]
    tail: list[Entry]
    is_affine: bool
    others: list[Entry]
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
    entries = tape.entries
    for entry in entries:
        if entry.shape.is_hook:
            raise NotSplittableError(f"{described(entry)}: {entry.shape.why}", described(entry))
    judge(tape)
    views = tape.views
    first = made_first(tape)
    later = [entry for entry in entries if entry not in first]
    _refuse_writes(tape, first, later)
    chunk = [entry for entry in later if entry.verdict.kind == "chunk"]
    whole = [entry for entry in later if entry.verdict.kind != "chunk"]
    writes = _leaves_written(tape, first), _leaves_written(tape, chunk)
    if root is None:
        return SplitPlan([*first], chunk, {}, [], [], False, whole, *writes)
    needed = _needed(whole, root, views)
    terms = {e.outs[0]: e for e in needed if e.verdict.kind == "term" and e.outs[0] is not None}
    tail = [entry for entry in needed if entry.verdict.kind != "term"]
    made_in_chunks = {n for entry in chunk for n in entry.made} | writes[1]
    has_grad = {number for number, leaf in tape.leaves.items() if leaf.value.requires_grad}
    taken = _taken(tail, made_in_chunks | has_grad, root)
    others = [entry for entry in whole if entry not in needed]
    if terms and not taken:
        affine = _is_affine(tail, set(terms))
        chunk = [*chunk, *terms.values()]
        return SplitPlan([*first], chunk, terms, [], tail, affine, others, *writes)
    # terms are a part of the tail where that takes more than them
    taken = _taken(needed, made_in_chunks | has_grad, root)
    if not any(number in made_in_chunks for number in taken):
        blame = next((entry for entry in needed if entry.verdict.why), None)
        if blame is None:
            raise NotSplittableError("nothing in it runs on one sample at a time")
        raise NotSplittableError(f"{described(blame)}: {blame.verdict.why}", described(blame))
    return SplitPlan([*first], chunk, {}, taken, needed, False, others, *writes)


def mixing_call(entries: Iterable[Entry]) -> Entry | None:
    """The first of some calls that wants all samples, if one does."""
    return next((e for e in entries if e.verdict.kind == "tail" and e.verdict.why), None)


def described(entry: Entry) -> str:
    """A call by name and place."""
    name = getattr(entry.func, "__name__", str(entry.func))
    where = f" at {entry.site}" if entry.site is not None else ""
    return f"{name}(){where}"


def _leaves_written(tape: Tape, entries: Iterable[Entry]) -> frozenset[int]:
    written = {n for entry in entries for n in written_groups(entry, tape.views)}
    return frozenset(written & tape.leaves.keys())


def _refuse_writes(tape: Tape, first: Iterable[Entry], later: list[Entry]) -> None:
    """Make sure that the order in which parts and whole run changes nothing that is written."""
    views = tape.views
    if not any(entry.shape.changed for entry in tape.entries):
        return
    early = {group for entry in first for group in touched_groups(entry, views)}
    # when it is written for the last time before anything else runs
    ends = {group: e.seq for e in first for group in written_groups(e, views)}
    read_whole: set[int] = set()
    made_whole: set[int] = set()
    for entry in later:
        written, touched = written_groups(entry, views), touched_groups(entry, views)
        is_chunk = entry.verdict.kind == "chunk"
        late = written & (early | (read_whole if is_chunk else set()))
        late |= {group for group in touched if entry.seq < ends.get(group, -1)}
        foreign = set() if is_chunk else written - made_whole
        if late or foreign:
            raise NotSplittableError(
                f"{described(entry)} uses a tensor that is written in place, and of which parts "
                "and the whole are used: clone() it first"
            )
        if not is_chunk:
            read_whole |= {views.get(n, n) for n in entry.reads}
            made_whole |= {views.get(n, n) for n in entry.made}


def _needed(whole: list[Entry], root: int, views: Mapping[int, int]) -> list[Entry]:
    """The calls that the root is made by, of those that want the whole batch."""
    wanted = {views.get(root, root), root}
    found = []
    for entry in reversed(whole):
        gives = {n for n in entry.outs if n is not None} | written_groups(entry, views)
        if gives & wanted or {views.get(n, n) for n in gives} & wanted:
            found.append(entry)
            wanted.update(entry.reads)
            wanted.update(views.get(n, n) for n in entry.reads)
    return found[::-1]


def _taken(entries: list[Entry], made: set[int], root: int) -> list[int]:
    """What some calls take of what was made before them."""
    found = {n: None for entry in entries for n in entry.reads if n in made}
    if root in made:
        found[root] = None
    return list(found)


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


_PRODUCTS = frozenset(["mul", "__mul__", "__rmul__", "mul_", "__imul__"])


_QUOTIENTS = frozenset(["div", "true_divide", "__truediv__", "div_", "__itruediv__"])


def _is_affine(tail: list[Entry], terms: set[int]) -> bool:
    """Whether the last calls only add terms up, and multiply them by constants."""
    depend = set(terms)
    for entry in tail:
        name = getattr(entry.func, "__name__", "")
        reads = [n for n in entry.reads if n in depend]
        if not reads:
            continue
        if name not in _LINEAR or (name in _PRODUCTS and len(reads) > 1):
            return False
        if name in _QUOTIENTS and (len(reads) > 1 or not _is_first(entry, reads[0])):
            return False
        # of several numbers, or of other options
        if any(meta.shape for meta in entry.shape.metas) or _has_options(entry):
            return False
        depend.update(n for n in entry.outs if n is not None)
    return True


def _is_first(entry: Entry, number: int) -> bool:
    return bool(entry.args) and getattr(entry.args[0], "number", None) == number


def _has_options(entry: Entry) -> bool:
    return any(key not in ("dtype", "device", "alpha") for key in entry.kwargs)
