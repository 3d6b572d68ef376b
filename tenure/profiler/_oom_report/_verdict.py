"""A cause in words, which `_causes` writes: one line with the remedy, and what speaks for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

Cause: TypeAlias = Literal[
    "leak",
    "results",
    "cycle",
    "traceback",
    "gradients",
    "logits",
    "optimizer_state",
    "batch",
    "weights",
    "fragmentation",
    "other_process",
    "host",
    "unknown",
]
_PREFIX = re.compile(r"\A(?:numpy array |a view in )?(?:[\w.<>]+\.<locals>\.|__main__\.)")
_MOST_CHARACTERS = 44
_ANY_INDEX = "[…]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cause.

    Attributes:
        cause: which.
        n_bytes: the bytes that speak for it.
        head: the cause and the remedy, in one line.
        evidence: sentences with numbers, and what else can be done.
    """

    cause: Cause
    n_bytes: int
    head: str
    evidence: tuple[str, ...]


def short(name: str) -> str:
    """A name as its function would say it: without the function, and without what holds it.

    What a function or a call has bound is told by where it piles up: `out` of each of the lambdas
    in `callbacks[…]` by the list.
    """
    inner, _, outer = name.partition(", held by ")
    if " of " in inner and ": " in inner:
        bound = inner.rpartition(": ")[2]
        is_argument = bound.startswith(("args[", "keywords["))
        piles_up_outside = _ANY_INDEX in outer and (is_argument or _ANY_INDEX not in bound)
        inner = outer.partition(", held by ")[0] if piles_up_outside else bound
    text = _PREFIX.sub("", inner)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
