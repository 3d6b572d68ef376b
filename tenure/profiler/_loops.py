"""Which code has loops: only such code can run for long without calling anything."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

_BACKWARD = frozenset(
    op for name, op in dis.opmap.items() if name.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
)


@lru_cache(maxsize=4096)
def has_loop(code: CodeType) -> bool:
    """Whether an instruction of ``code`` jumps back."""
    return not _BACKWARD.isdisjoint(code.co_code[::2])
