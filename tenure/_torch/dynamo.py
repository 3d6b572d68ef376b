"""Keeping dynamo from compiling: the library's own frames, and work that is not to be compiled.

What is called from a frame that dynamo gave up on (a graph break inside a ``with`` block, say) is
compiled by itself. There ``is_dynamo_compiling()`` folds to True, so a verb would do nothing for a
scope that is really open; and the compiled handler takes one torch function for another, because
dynamo does not guard on its ``func``. Traced as a part of the user's function all is transparent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
_C: Any = torch._C


def never_compiled(function: Function) -> Function:
    """Let the frames of ``function``, and what they call, run as they are; it costs no call.

    Source: ``torch._dynamo.eval_frame.skip_code``, without importing dynamo.
    """
    eval_frame = _C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


@contextmanager
def not_compiling() -> Iterator[None]:
    """A block in which compiled functions run as they are written: nothing is compiled for it.

    Another thread that calls a compiled function meanwhile may run it so too, which is slower.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:  # to load it takes seconds
        yield
        return
    eval_frame = _C._dynamo.eval_frame
    # a stance can't be taken where a graph break of the caller's has left its callback
    callback = eval_frame.set_eval_frame(None)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        eval_frame.set_eval_frame(callback)


def works() -> bool:
    """Whether marked functions run as they are, and in a block that does not compile, all do."""
    seen: list[bool] = []

    @never_compiled
    def marked(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    def unmarked(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    torch.compile(marked, backend="eager")(torch.ones(1))
    with not_compiling():
        torch.compile(unmarked, backend="eager")(torch.ones(1))
    return seen == [False, False]
