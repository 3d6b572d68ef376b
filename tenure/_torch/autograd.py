"""What torch keeps to itself of autograd: that its engine runs, what nodes saved, hooks, and texts.

Every public way into the engine passes one Python function; its code object is the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from . import bound, getter, optional, refuse, require
from .patches import Patch

BACKWARD_TWICE = "through the graph a second time"
"""Part of the text of ERR_BACKWARD_TWICE in torch/csrc/autograd/saved_variable.cpp: torch has no
class of its own for this error."""
WITHOUT_GRAPH = "does not require grad"
"""Part of the text of torch's error if something is differentiated that has no graph."""

_ENGINE = "torch.autograd.graph._engine_run_backward"
_OF_ENGINE = "tenure.profiler, and scopes in backward passes"
ENGINE_CODE: CodeType | None = getattr(optional(_ENGINE), "__code__", None)
"""The code of the frame that stands on the stack while a backward pass runs on this thread; None
where torch has none: who compares frames with it calls `check_engine_is_seen` first."""
_task_id = bound("torch._C._current_graph_task_id", "tenure.profiler and tenure.testing")
_TRAINING = "training of paged models"
OF_A_LEAF = 2**64 - 1
"""The number of the node that adds to a leaf's gradient: the largest there is, so it runs first."""
_top_hooks = bound("torch._C._autograd._top_saved_tensors_default_hooks", _TRAINING)
at_end_of_backward: Callable[[Callable[[], object]], None] = bound(
    "torch.autograd.Variable._execution_engine.queue_callback", _TRAINING
)
"""Has something called when the backward pass that runs has come to its end, on any thread. The
engine lets go of it with the pass, also of one that fails and so never calls it."""
_transform = bound(
    "torch._C._functorch.peek_interpreter_stack", f"tenure.adaptive.step and {_TRAINING}"
)
_is_legacy_batch = bound("torch._C._functorch.is_legacy_batchedtensor", _TRAINING)
_SAVED = "who holds what, and Courtesy"
_SavedTensor: Any = bound("torch._C._autograd.SavedTensor", _SAVED)
_data_of: Callable[[Any], Any] = getter("torch._C._autograd.SavedTensor.data", _SAVED)
_hook_of: Callable[[Any], Any] = getter("torch._C._autograd.SavedTensor.unpack_hook", _SAVED)
_number: Callable[[Any], Any] = getter(
    "torch._C._functions.AccumulateGrad._sequence_nr",
    "predictions of memory, tenure.profiler and the simulated accelerator",
)
_HOOKS = "step() and predictions of memory"
hooks_of: Callable[[Tensor], Any] = getter("torch.Tensor._backward_hooks", _HOOKS)
"""The hooks of a leaf's gradient by their numbers, in a dictionary that torch reads; or None."""
post_hooks_of: Callable[[Tensor], Mapping[int, Any] | None] = getter(
    "torch.Tensor._post_accumulate_grad_hooks", _HOOKS
)
"""The hooks of a leaf that run when its gradient has been added to."""


def require_hooks() -> None:
    """Make sure that the hooks of a leaf can be read, before anything is changed.

    Raises:
        MissingTorchNameError: this torch has no such name.
    """
    require(hooks_of, post_hooks_of)


def give_hooks(leaf: Any, hooks: Any, post_hooks: Any) -> None:
    """Set the hooks of a leaf's gradient, and those that run once it has been accumulated."""
    leaf._backward_hooks, leaf._post_accumulate_grad_hooks = hooks, post_hooks


def carry_hooks_over(handle: Tensor) -> None:
    """Have the hooks that a handle shows run for the tensor that it has got meanwhile."""
    # torch keeps them with the handle, and has the tensor call them when they are set
    leaf: Any = handle
    if hooks_of(handle):
        leaf._backward_hooks = hooks_of(handle)
    if post_hooks_of(handle):
        leaf._post_accumulate_grad_hooks = post_hooks_of(handle)


def is_mean_over_rows(node: Any) -> bool:
    """Return whether the node of a number is that of a mean, or of a loss of torch that is one.

    A mean of what was summed over all, or over dimension 0, is none over rows.
    """
    if node is None or not node.name().startswith("Mean"):
        # nodes of losses keep the number of their reduction
        return getattr(node, "_saved_reduction", None) == 1
    if node._saved_self_sym_numel <= 1:
        return False
    below = node.next_functions[0][0]
    return below is None or not below.name().startswith("Sum") or 0 not in below._saved_dim


def is_running_node() -> bool:
    """Return whether autograd's engine called this code, also on a thread of its own."""
    return running_task() != -1


def is_in_engine(frame: FrameType | None) -> bool:
    """Return whether a backward pass is running on the stack that a frame ends."""
    check_engine_is_seen(now=True)
    while frame is not None and frame.f_code is not ENGINE_CODE:
        frame = frame.f_back
    return frame is not None


def hooks_of_saved() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return the hooks that pack and unpack saved tensors on this thread, or None."""
    pair: tuple[Any, Any] | None = _top_hooks(False)
    return pair


def is_of_checkpoint(hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None) -> bool:
    """Return whether hooks are those of a checkpoint, as it computes or recomputes."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def patch_of_checkpoints(around: Callable[[Any, Any], AbstractContextManager[None]]) -> Patch:
    """Return a patch by which each checkpoint that is not reentrant opens a block.

    Args:
        around: gets the function that runs in the checkpoint and what it is given, and returns the
            block.
    """

    def wrapper(generator: Callable[..., Any]) -> Callable[..., Any]:
        checkpointed = contextmanager(generator)

        def watched(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            with checkpointed(function, *args, **kwargs), around(function, (args, kwargs)):
                yield

        return watched

    return Patch("torch.utils.checkpoint", {"_checkpoint_without_reentrant_generator": wrapper})


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` runs on this thread."""
    return _transform() is not None


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Return whether it holds gradients of several outputs (``is_grads_batched=True``)."""
    # Such a vmap is older than those of torch.func, and no transform of theirs.
    return bool(_is_legacy_batch(gradient)) or is_transformed()


def running_task() -> int:
    """Return the number of the backward pass whose node runs on this thread; -1 where none does."""
    return int(_task_id())


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
    """Return whether an object is what torch wraps a tensor in that a node has saved."""
    # isinstance would ask the object for its class, which may run its code
    return issubclass(type(found), _SavedTensor)


def content_of_saved(saved: Any) -> tuple[Any, Any]:
    """Return what torch has saved, packed if a hook did that, and the hook that unpacks it."""
    return _data_of(saved), _hook_of(saved)


def node_number(node: Any) -> int:
    """Return how many nodes this thread made before a node; `OF_A_LEAF` for a leaf's node."""
    return int(_number(node)())
