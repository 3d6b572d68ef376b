"""How to see that autograd's engine is running below: torch offers no public question for it.

Every public way into the engine passes one Python function; its code object is the mark.
"""

from __future__ import annotations

import torch
from torch.autograd import graph

ENGINE_CODE = graph._engine_run_backward.__code__
"""The code of the frame that stands on the stack while a backward pass runs on this thread."""


def works() -> bool:
    """Whether a hook that runs in a backward pass has that frame below it."""
    import sys

    seen: list[bool] = []

    def hook(_: torch.Tensor) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code is not ENGINE_CODE:
            frame = frame.f_back  # type: ignore[assignment]
        seen.append(frame is not None)

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    return seen == [True]
