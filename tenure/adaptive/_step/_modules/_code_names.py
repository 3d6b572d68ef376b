"""The names that the code of a function reads, the code written inside it included."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")


@dataclass(frozen=True, slots=True)
class CodeNames:
    """What a piece of code names.

    Attributes:
        globals: the globals and builtins that it reads.
        attributes: the attributes and methods that it reads, of whatever object.
    """

    globals: frozenset[str]
    attributes: frozenset[str]


@lru_cache(maxsize=512)
def names_in(code: CodeType) -> CodeNames:
    """Read the instructions; code holds no tensors, so remembering it keeps none alive."""
    found: set[str] = set()
    others: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            names = found if instruction.opname in _GLOBAL else others
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_in(constant)
            found |= inner.globals
            others |= inner.attributes
    return CodeNames(frozenset(found), frozenset(others))
