"""How to see that autograd's engine is running below: torch offers no public question for it.

Every public way into the engine passes one Python function; its code object is the mark.
"""

from __future__ import annotations

import torch
from torch.autograd import graph

ENGINE_CODE = graph._engine_run_backward.__code__
"""The code of the frame that stands on the stack while a backward pass runs on this thread."""


def is_running_node() -> bool:
    """Whether autograd's engine has called, on this thread, what asks: on one of its own too."""
    return bool(torch._C._current_graph_task_id() != -1)


def works() -> bool:
    """Whether a hook that runs in a backward pass has that frame below it, and is told so."""
    import sys

    seen: list[bool] = []

    def hook(_: torch.Tensor) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code is not ENGINE_CODE:
            frame = frame.f_back  # type: ignore[assignment]
        seen.append(frame is not None and is_running_node())

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    return seen == [True] and not is_running_node()
