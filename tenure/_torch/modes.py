"""The stack of torch-function modes of this thread, of which torch has no public view.

torch's own ``with mode:`` pops by position; tenure removes by identity, so that other people's
modes stay where they were whatever order the blocks end in.
"""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C
push = _C._push_on_torch_function_stack
_pop = _C._pop_torch_function_stack
_length = _C._len_torch_function_stack
_at = _C._get_function_stack_at


def is_active(mode: object) -> bool:
    """Whether ``mode`` stands on the stack; it does not inside a backward hook, for one."""
    depth = _length()
    while depth:
        depth -= 1
        if _at(depth) is mode:
            return True
    return False


def remove(mode: object) -> None:
    """Take the topmost occurrence of ``mode``, if any, off the stack; the others stay in order."""
    top = _pop() if _length() else None
    if top is mode or top is None:
        return
    remove(mode)
    push(top)


def works() -> bool:
    """Whether push, is_active and remove agree on this torch."""
    lower, upper = torch.overrides.BaseTorchFunctionMode(), torch.overrides.BaseTorchFunctionMode()
    push(lower)
    push(upper)
    remove(lower)
    agreed = is_active(upper) and not is_active(lower)
    remove(upper)
    return agreed and not is_active(upper)
