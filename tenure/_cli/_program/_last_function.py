"""The function that the last statement of a program calls, such as `main()`.

Its variables are still there at the end if its frame is held meanwhile, which changes nothing of
the program: nothing of it runs after that function, but for an exit.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

_MAIN = "__main__"
# what is left of `main()`, and of `sys.exit(main())`
_OPS = frozenset({"POP_TOP", "PRECALL", "CALL", "LOAD_CONST", "LOAD_SMALL_INT", "NOP"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST"})


def last_function(frame: FrameType | None) -> FrameType | None:
    """The frame on a stack that the last statement of ``__main__`` has called, if there is one."""
    space = getattr(sys.modules.get(_MAIN), "__dict__", None)
    while frame is not None and frame.f_back is not None:
        caller = frame.f_back
        if caller.f_globals is space and caller.f_code.co_name == "<module>":
            return frame if _is_last(caller) else None
        frame = caller
    return None


def _is_last(module: FrameType) -> bool:
    for each in dis.get_instructions(module.f_code):
        if each.offset <= module.f_lasti:
            continue
        if each.opname in _ENDS:
            return True
        if each.opname not in _OPS:
            return False
    return False
