"""Which code has loops: only such code can run for long without calling anything."""

from __future__ import annotations

import dis
from pathlib import Path
from types import CodeType

import torch

_BACKWARD = frozenset(
    op for name, op in dis.opmap.items() if name.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
)
_MAX_KNOWN = 4096
_TORCH = str(Path(torch.__file__).parent)
_known: dict[int, tuple[CodeType, bool]] = {}
"""By identity, because the hash of a code takes long; each is held, so that none comes twice."""


def has_loop(code: CodeType) -> bool:
    """Whether an instruction of ``code`` jumps back, and it isn't torch's own.

    Those of torch end soon, or call the program.
    """
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        jumps_back = not _BACKWARD.isdisjoint(code.co_code[::2])
        known = _known[id(code)] = code, jumps_back and not code.co_filename.startswith(_TORCH)
    return known[1]
