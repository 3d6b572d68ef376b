"""How what was recorded is split: what runs on parts of the batch, and what wants all of it.

Each call is of one kind. Before: made of the batch alone, run once on all of it. Chunk: run on each
part. Term: a mean or a sum over the samples. Tail: run once, on what the others give. Invariant: a
plan gives what the recorded program gives, or there is none, and an error says which call is why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._rules import names
from ._tape import Entry, Tape


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
    """

    before: list[Entry]
    chunk: list[Entry]
    terms: dict[int, Entry]
    frontier: list[int]
    tail: list[Entry]
    is_affine: bool
    others: list[Entry]


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
    groups = groups_of(tape)
    first = _before(entries)
    later = [entry for entry in entries if entry not in first]
    _refuse_writes(tape, first, later, groups)
    chunk = [entry for entry in later if entry.shape.kind == "chunk"]
    whole = [entry for entry in later if entry.shape.kind != "chunk"]
    if root is None:
        return SplitPlan([*first], chunk, {}, [], [], False, whole)
    needed = _needed(whole, root, groups)
    terms = {e.outs[0]: e for e in needed if e.shape.kind == "term" and e.outs[0] is not None}
    tail = [entry for entry in needed if entry.shape.kind != "term"]
    made_in_chunks = {n for entry in chunk for n in entry.outs if n is not None}
    has_grad = {number for number, leaf in tape.leaves.items() if leaf.value.requires_grad}
    taken = _taken(tail, made_in_chunks | has_grad, root)
    others = [entry for entry in whole if entry not in needed]
    if terms and not taken:
        affine = _is_affine(tail, set(terms))
        return SplitPlan([*first], [*chunk, *terms.values()], terms, [], tail, affine, others)
    # terms are a part of the tail where that takes more than them
    taken = _taken(needed, made_in_chunks | has_grad, root)
    if not any(number in made_in_chunks for number in taken):
        blame = next((entry for entry in needed if entry.site is not None), None)
        if blame is None:
            raise NotSplittableError("nothing in it runs on one sample at a time")
        raise NotSplittableError(f"{described(blame)}: {blame.shape.why}", described(blame))
    return SplitPlan([*first], chunk, {}, taken, needed, False, others)


def described(entry: Entry) -> str:
    """A call by name and place."""
    name = getattr(entry.func, "__name__", str(entry.func))
    where = f" at {entry.site}" if entry.site is not None else ""
    return f"{name}(){where}"


def groups_of(tape: Tape) -> dict[int, int]:
    """For each value the first one that it shares memory with."""
    groups: dict[int, int] = {number: number for number in tape.leaves}
    for entry in tape.entries:
        given: list[int] = list(dict.fromkeys(entry.reads))
        for number, alias in zip(entry.made, entry.shape.aliases, strict=True):
            groups[number] = number if alias is None else _first_of(groups, given[alias])
    return groups


def _first_of(groups: dict[int, int], number: int) -> int:
    return groups[number] if number in groups else number  # noqa: SIM401  # pyright


def written_groups(entry: Entry, groups: dict[int, int]) -> set[int]:
    """What a call writes into, as the first values that share that memory."""
    if not entry.shape.changed:
        return set()
    given: list[int] = list(dict.fromkeys(entry.reads))
    return {_first_of(groups, given[i]) for i in entry.shape.changed if i < len(given)}


def _before(entries: list[Entry]) -> dict[Entry, None]:
    """The calls that give what is made of the batch alone, and what they are made of."""
    wanted = {n for e in entries if e.shape.kind == "before" for n in e.reads}
    found = {entry for entry in entries if entry.shape.kind == "before"}
    if not found:
        return {}
    for entry in reversed(entries):
        if entry in found or any(n in wanted for n in entry.outs if n is not None):
            found.add(entry)
            wanted.update(entry.reads)
    return {entry: None for entry in entries if entry in found}


def _refuse_writes(
    tape: Tape, first: Iterable[Entry], later: list[Entry], groups: dict[int, int]
) -> None:
    """Make sure that the order in which parts and whole run changes nothing that is written."""
    if not any(entry.shape.changed for entry in tape.entries):
        return
    early = {groups.get(n, n) for e in first for n in (*e.reads, *e.outs) if n is not None}
    read_whole: set[int] = set()
    made_whole: set[int] = set()
    for entry in later:
        written = written_groups(entry, groups)
        reads = {groups.get(n, n) for n in entry.reads}
        is_chunk = entry.shape.kind == "chunk"
        late = written & (early | (read_whole if is_chunk else set()))
        foreign = set() if is_chunk else written - made_whole
        if late or foreign:
            raise NotSplittableError(
                f"{described(entry)} writes into a tensor of which parts and the whole are used"
            )
        if not is_chunk:
            read_whole |= reads
            made_whole |= {groups.get(n, n) for n in entry.outs if n is not None}


def _needed(whole: list[Entry], root: int, groups: dict[int, int]) -> list[Entry]:
    """The calls that the root is made by, of those that want the whole batch."""
    wanted = {groups.get(root, root), root}
    found = []
    for entry in reversed(whole):
        gives = {n for n in entry.outs if n is not None} | written_groups(entry, groups)
        if gives & wanted or {groups.get(n, n) for n in gives} & wanted:
            found.append(entry)
            wanted.update(entry.reads)
            wanted.update(groups.get(n, n) for n in entry.reads)
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


def plain_tensors(value: Any) -> list[Tensor]:
    """The tensors among stored arguments that were not recorded."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list):
        return [tensor for each in value for tensor in plain_tensors(each)]
    if type(value) is dict:
        return plain_tensors(list(value.values()))
    return []
