"""Which cause an out-of-memory error has, and its remedy: rules by bytes, the certain ones first.

What is of no use any more is the cause where it is much of what could be free: without it the same
work would have fitted, as it did when the program began. Otherwise it is what ran.
"""

from __future__ import annotations

from tenure._text import format_bytes

from ._facts import Facts
from ._kept import piles_of
from ._piles import Pile
from ._told import verdict_of
from ._verdict import Verdict
from ._work import FIXED, batch, building, logits, optimizer, weights

# Of what the work itself takes: a smaller pile is beside the point.
_MUCH = 0.25
# The same of a pile, where what ran has a cause of its own.
_MOST = 0.45
# A pile that has a rule of its own comes before a plain one, if both are about as large.
_TELLING = 1.3
_PLAIN = frozenset({"leak", "results"})


def judge(facts: Facts) -> Verdict:
    """The cause; `unknown` where nothing was seen that could be one."""
    certain = _fragmentation(facts) or _other_process(facts)
    if certain is not None:
        return certain
    phase = building(facts) or optimizer(facts) or logits(facts)
    piles = [pile for pile in piles_of(facts) if _explains(pile, facts, phase)]
    if piles:
        return verdict_of(max(piles, key=_weight), facts)
    return phase or _host(facts) or weights(facts) or batch(facts)


def _weight(pile: Pile) -> float:
    return pile.n_bytes * (1 if pile.kind in _PLAIN else _TELLING)


def _explains(pile: Pile, facts: Facts, phase: Verdict | None) -> bool:
    """Whether without a pile there would have been room."""
    lacking = facts.wanted_bytes - (facts.free_bytes or 0)
    if facts.free_bytes is not None and pile.n_bytes < lacking:
        return False
    if facts.total_bytes is not None and facts.wanted_bytes > facts.total_bytes:
        return False
    all_bytes = facts.used_bytes + facts.wanted_bytes
    # of a phase that fills memory for good, all of it counts
    if phase is not None and phase.cause in ("weights", "optimizer_state"):
        return pile.n_bytes >= _MOST * max(all_bytes, phase.n_bytes)
    of_work = all_bytes if pile.are_models else all_bytes - facts.bytes_of(*FIXED)
    # gradients could be free, and weights could not
    if pile.kind == "gradients":
        of_work += pile.n_bytes - facts.bytes_of(*FIXED)
    # a buffer that grows is a part of the model, and of the work all the same
    share = pile.n_bytes / max(1, of_work, pile.n_bytes)
    return share >= (_MUCH if phase is None else _MOST)


# --- what is certain by the numbers of the allocator


def _fragmentation(facts: Facts) -> Verdict | None:
    counters = facts.counters
    if counters is None or not facts.wanted_bytes:
        return None
    unused = counters.reserved - counters.allocated
    largest = facts.cached.largest_free_bytes if facts.cached is not None else 0
    enough = unused + (facts.free_bytes or 0) >= facts.wanted_bytes
    if not enough or unused < counters.reserved // 10 or largest >= facts.wanted_bytes:
        return None
    return Verdict(
        "fragmentation",
        unused,
        f"Fragmentation: {format_bytes(unused)} reserved, unused. Set expandable_segments:True.",
        (
            f"The allocator has {format_bytes(counters.reserved)} and uses "
            f"{format_bytes(counters.allocated)}; its largest free block has "
            f"{format_bytes(largest)}, and {format_bytes(facts.wanted_bytes)} were wanted.",
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True before the program starts; or call "
            "empty_cache() between phases, and keep sizes alike (pad batches to a few lengths).",
        ),
    )


def _other_process(facts: Facts) -> Verdict | None:
    total, others = facts.total_bytes or 0, facts.others_bytes
    own = max(facts.used_bytes, total - others - (facts.free_bytes or 0))
    if not total or others < total // 10 or others < own:
        return None
    return Verdict(
        "other_process",
        others,
        f"Another process has {format_bytes(others)} of {facts.device}. End it, or use another "
        "device.",
        (
            f"{facts.device} has {format_bytes(total)}: others have {format_bytes(others)}, this "
            f"process {format_bytes(own)}, and {format_bytes(facts.free_bytes or 0)} is free.",
            "nvidia-smi (or your system's tool) lists them; a notebook that is still open is one.",
        ),
    )


def _host(facts: Facts) -> Verdict | None:
    host = facts.host
    if facts.device != "cpu" or facts.info.kind != "host" or host is None:
        return None
    tensors = facts.used_bytes
    others = host.rss_bytes - host.began_bytes - tensors
    limit = host.own_limit_bytes or host.limit_bytes
    group = f" of {format_bytes(limit)}" if limit else ""
    if others > tensors + facts.wanted_bytes and others > host.rss_bytes // 4:
        return Verdict(
            "host",
            others,
            f"Host memory: {format_bytes(others)} is no tensors (NumPy, Python). Free it first.",
            (
                f"The process has {format_bytes(host.rss_bytes)}{group}; tensors take "
                f"{format_bytes(tensors)} of it, and since recording began "
                f"{format_bytes(others)} of other objects came.",
                "Arrays, lists of numbers and data sets in memory count here: read them in pieces "
                "or map them (numpy.memmap, torch.load(mmap=True)).",
            ),
        )
    return None
