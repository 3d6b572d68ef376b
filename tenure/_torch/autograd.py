"""What torch keeps to itself of autograd: that its engine runs, what nodes saved, hooks, and texts.

Every public way into the engine passes one Python function; its code object is the mark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from . import bound, getter, optional, refuse

BACKWARD_TWICE = "through the graph a second time"
"""Part of the text of ERR_BACKWARD_TWICE in torch/csrc/autograd/saved_variable.cpp: torch has no
class of its own for this error."""

_ENGINE = "torch.autograd.graph._engine_run_backward"
_OF_ENGINE = "tenure.profiler, and scopes in backward passes"
ENGINE_CODE: CodeType | None = getattr(optional(_ENGINE), "__code__", None)
"""The code of the frame that stands on the stack while a backward pass runs on this thread; None
where torch has none: who compares frames with it calls `check_engine_is_seen` first."""
_task_id = bound("torch._C._current_graph_task_id", "tenure.profiler and tenure.testing")
_SavedTensor: Any = bound("torch._C._autograd.SavedTensor", "who holds what, and Courtesy")
hooks_of: Callable[[Tensor], Any] = getter("torch.Tensor._backward_hooks", "step()")
"""The hooks of a leaf's gradient by their numbers, in a dictionary that torch reads; or None."""
post_hooks_of: Callable[[Tensor], Mapping[int, Any] | None] = getter(
    "torch.Tensor._post_accumulate_grad_hooks", "step()"
)
"""The hooks of a leaf that run when its gradient has been added to."""


def carry_hooks_over(handle: Tensor) -> None:
    """Have the hooks that a handle shows run for the tensor that it has got meanwhile."""
    # torch keeps them with the handle, and has the tensor call them when they are set
    leaf: Any = handle
    if hooks_of(handle):
        leaf._backward_hooks = hooks_of(handle)
    if post_hooks_of(handle):
        leaf._post_accumulate_grad_hooks = post_hooks_of(handle)


def is_running_node() -> bool:
    """Whether autograd's engine has called, on this thread, what asks: on one of its own too."""
    return bool(_task_id() != -1)


def check_engine_is_seen(*, now: bool = False) -> None:
    """Make sure that a backward pass can be told by its frame.

    Args:
        now: ask only whether one that is running now can be.

    Raises:
        MissingTorchNameError: it can't.
    """
    if ENGINE_CODE is None and (not now or is_running_node()):
        refuse(_ENGINE, _OF_ENGINE)


def is_saved_tensor(found: object) -> bool:
    """Whether an object is what torch wraps a tensor in that a node has saved."""
    # isinstance would ask the object for its class, which may run its code
    return issubclass(type(found), _SavedTensor)


def wraps_saved_tensors(cls: type) -> bool:
    """Whether `is_saved_tensor` is true of the objects of a class."""
    return issubclass(cls, _SavedTensor)


def works() -> bool:
    """Whether a hook has that frame below it and is told so; what was saved is known, and ends."""
    seen: list[bool] = []

    def hook(_: Tensor) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code is not ENGINE_CODE:
            frame = frame.f_back  # type: ignore[assignment]
        seen.append(frame is not None and is_running_node())

    leaf = torch.ones(1, requires_grad=True)
    # on the CPU autograd calls hooks on the thread that called backward()
    leaf.register_hook(hook)
    product: Any = leaf * leaf
    seen.append(is_saved_tensor(product.grad_fn._raw_saved_self))
    product.backward()
    seen.append(bool(hooks_of(leaf)) and not post_hooks_of(leaf))
    try:
        product.backward()
    except RuntimeError as error:
        seen.append(BACKWARD_TWICE in str(error))
    return seen == [True] * 4 and not is_running_node()
