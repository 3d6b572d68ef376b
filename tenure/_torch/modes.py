"""The stacks of modes that each thread has, of which torch has no public view.

torch's own ``with mode:`` pops by position; tenure removes by identity, so that other people's
modes stay where they were whatever order the blocks end in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import bound, optional, refuse

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode
else:
    DispatchMode = bound(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "memory_budget() and the verification of a step",
    )


class EagerMode(DispatchMode):
    """A dispatch mode that only code which runs eagerly meets.

    Of others torch guards each operation against dynamo, which the first one imports: seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_SCOPES = "scopes"
_COUNTING = "memory_budget()"
push = bound("torch._C._push_on_torch_function_stack", _SCOPES)
_pop = bound("torch._C._pop_torch_function_stack", _SCOPES)
n_function_modes = bound("torch._C._len_torch_function_stack", _SCOPES)
function_mode_at = bound("torch._C._get_function_stack_at", _SCOPES)
_n_dispatch = bound("torch._C._len_torch_dispatch_stack", _COUNTING)
_dispatch_at = bound("torch._C._get_dispatch_stack_at", _COUNTING)
_pop_dispatch = bound("torch.utils._python_dispatch._pop_mode", "tenure.profiler.Timeline")
_push_dispatch = bound("torch.utils._python_dispatch._push_mode", "tenure.profiler.Timeline")
_OPERATOR = type(torch.ops.aten.add.Tensor)


def is_active(mode: object) -> bool:
    """Return whether a function mode is active; none is inside a backward hook, for example."""
    depth = n_function_modes()
    while depth:
        depth -= 1
        if function_mode_at(depth) is mode:
            return True
    return False


def remove(mode: object) -> bool:
    """Take the topmost occurrence of a function mode off; the others stay in order.

    Returns:
        False where it stands nowhere, as inside a backward hook.
    """
    top = _pop() if n_function_modes() else None
    if top is mode or top is None:
        return top is mode
    found = remove(mode)
    push(top)
    return found


def push_lowest(mode: object) -> None:
    """Put a function mode below all others but the one of the default device.

    What ``with`` has put on the stack is taken off by position: a mode that stays when the block
    ends must not stand above it. torch takes the default device's off where it stands, at the
    bottom.
    """
    above = [_pop() for _ in range(n_function_modes())]
    default = getattr(optional("torch._GLOBAL_DEVICE_CONTEXT"), "device_context", None)
    if above and above[-1] is default:
        push(above.pop())
    push(mode)
    for other in reversed(above):
        push(other)


def open_modes() -> list[DispatchMode]:
    """Return the dispatch modes that the program has open on this thread, the innermost last."""
    # the others are of torch's own compiler, and stand apart from the stack of the program
    return [mode for mode in all_modes() if not mode.is_infra_mode()]


def all_modes() -> list[DispatchMode]:
    """Return all dispatch modes of this thread, also those of torch's own compiler."""
    return [_dispatch_at(i) for i in range(_n_dispatch())]


def remove_dispatch(mode: DispatchMode) -> bool:
    """Take a dispatch mode that was entered off this thread's stack; the others stay in order.

    Returns:
        False where it does not stand there.
    """
    modes = open_modes()
    if mode not in modes:
        return False
    above = modes[modes.index(mode) + 1 :]
    if not above:
        mode.__exit__(None, None, None)
        return True
    for _ in [*above, mode]:
        _pop_dispatch()
    for each in above:
        _push_dispatch(each)
    # A mode notes what was so before it was entered, and brings that back. What was so before this
    # one is now what was so before the next.
    heir = vars(above[0])
    for name, flags in vars(mode).items():
        if name.startswith("old_") and name.endswith("_flags") and heir.get(name):
            heir[name][-1] = flags[-1]
    return True


def schema_of(func: Any) -> Any:
    """Return the schema of an operator in a dispatch mode; None for a higher-order one."""
    schema = getattr(func, "_schema", None)
    if schema is None and isinstance(func, _OPERATOR):
        refuse("torch._ops.OpOverload._schema", f"{_COUNTING} and the verification of a step")
    return schema
