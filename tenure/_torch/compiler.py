"""torch.compile: what it must not compile, which sizes change, and which tensors its graphs keep.

What is called from a frame that dynamo gave up on (a graph break inside a ``with`` block, say) is
compiled by itself. There ``is_dynamo_compiling()`` folds to True, so a verb would do nothing for a
scope that is really open; and the compiled handler takes one torch function for another, because
dynamo does not guard on its ``func``. Traced as a part of the user's function all is transparent.

Invariant: dynamo is never loaded here, which takes seconds: where it is not, nothing is compiled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import bound, getter, optional, refuse

Function = TypeVar("Function", bound=Callable[..., Any])

_DYNAMO = "torch._dynamo"
_FUNCTORCH = "torch._functorch.config"
_TREES = "torch._inductor.cudagraph_trees"
_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_PURPOSE = "scopes, retries and paging in compiled code"
_EXECUTION = f"{_EVAL_FRAME}.set_code_exec_strategy"
_strategy_of = optional(_EXECUTION)
_strategy = optional(f"{_EVAL_FRAME}._FrameExecStrategy")
_action = optional(f"{_EVAL_FRAME}._FrameAction")
_can_mark = None not in (_strategy_of, _strategy, _action)
_compiled_call: Callable[[nn.Module], Any] = getter(
    "torch.nn.Module._compiled_call_impl", "step(), predictions of memory and paging"
)
SCRIPTED = tuple(filter(None, (torch.ScriptFunction, optional("torch._C.ScriptMethod"))))
"""The classes of functions and methods of TorchScript."""
_set_eval_frame = bound(f"{_EVAL_FRAME}.set_eval_frame", "step() beside compiled code")


def never_compiled(function: Function) -> Function:
    """Let the frames of ``function``, and what they call, run as they are; it costs no call.

    Source: ``torch._dynamo.eval_frame.skip_code``, without importing dynamo.
    """
    if _can_mark:
        skip = _action.SKIP
        _strategy_of(function.__code__, _strategy(skip, skip))
    return function


def breaks_graphs(function: Function) -> Function:
    """Let compiled code that calls ``function`` end its graph there, and run its frame as it is.

    What is never compiled by itself is traced all the same where compiled code calls it. What it
    calls is compiled if it is compiled otherwise.

    Source: ``torch.compiler.disable``, without importing dynamo.
    """
    if not _can_mark:
        return torch.compiler.disable(function)  # type: ignore[no-any-return]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return never_compiled_alone(function)


def never_compiled_alone(function: Function) -> Function:
    """Let the frames of ``function`` run as they are, where they are no part of a graph.

    What they call is compiled as it would be without them, by its own code. A wrapper of many
    functions would be compiled for each, up to the few times that dynamo allows for one.
    """
    if _can_mark:
        _strategy_of(function.__code__, _strategy(_action.SKIP, _action.DEFAULT))
    return function


def _refuse_to_be_compiled() -> bool:
    if torch.compiler.is_dynamo_compiling():
        refuse(_EXECUTION, _PURPOSE)
    return False


# Where functions can't be marked, a scope can't tell whether it is traced or compiled by itself,
# and would be lost without a word. The function itself otherwise: dynamo folds it by identity.
is_dynamo_compiling: Callable[[], bool] = (
    torch.compiler.is_dynamo_compiling if _can_mark else _refuse_to_be_compiled
)


@contextmanager
def not_compiling() -> Iterator[None]:
    """Return a block in which compiled functions run uncompiled, as they are written.

    Another thread that calls a compiled function meanwhile may run it so too, which is slower.
    """
    if not has_compiled():
        yield
        return
    # a stance can't be taken where a graph break of the caller's has left its callback
    callback = _set_eval_frame(None)
    try:
        with _eager_stance:
            yield
    finally:
        _set_eval_frame(callback)


class _EagerStance:
    """Blocks in which nothing is compiled, on any threads, which end in any order.

    torch has one stance for all threads, and puts back that from before a block. Of two blocks that
    overlap, the one that ends last would put back the other's, for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_blocks = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_blocks:
                self._stance = torch.compiler.set_stance("force_eager")
            self._n_blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_blocks -= 1
            if not self._n_blocks:
                self._stance.__exit__(None, None, None)


_eager_stance = _EagerStance()


def is_compiled(value: object) -> bool:
    """Return whether a module or function was made by ``torch.compile`` or ``compile()``."""
    home = sys.modules.get(f"{_DYNAMO}.eval_frame")
    if home is None:
        return False
    if isinstance(value, nn.Module):
        return isinstance(value, home.OptimizedModule) or _compiled_call(value) is not None
    return "_torchdynamo_orig_callable" in getattr(value, "__dict__", ())


def has_compiled() -> bool:
    """Return whether anything may be compiled in this process."""
    return f"{_DYNAMO}.eval_frame" in sys.modules


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let compiled code that gets ``tensor`` expect other sizes of a dimension, unless it can't.

    Without it dynamo compiles once for the first size, and again when it meets another. It still
    compiles a size of 1 by itself, and one that the code itself compares with a number.
    """
    # half imported, on another thread, it has no such name yet
    mark = getattr(sys.modules.get(_DYNAMO), "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, dim % tensor.dim())


@contextmanager
def marked_dynamic(tensors: Iterable[tuple[Tensor, int]]) -> Iterator[None]:
    """Return a block in which tensors of the user's own are marked; they keep nothing of it."""
    if _DYNAMO not in sys.modules:
        yield
        return
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for tensor, dim in tensors:
        space = vars(tensor)
        # the user has marked it: that holds, whatever it says
        if not any(name.startswith("_dynamo_") for name in space):
            before.append((space, space.copy()))
            mark_dynamic(tensor, dim)
    try:
        yield
    finally:
        for space, attributes in before:
            for name in space.keys() - attributes.keys():
                if "_dynamo_" in name:
                    del space[name]


def draws_again_in_backward() -> bool:
    """Return whether compiled code may draw the forward's random numbers anew in its backward.

    Source: https://github.com/pytorch/pytorch/issues/190758
    """
    budget = getattr(sys.modules.get(_FUNCTORCH), "activation_memory_budget", 1.0)
    return isinstance(budget, float | int) and budget < 1


def has_graph_outputs() -> bool:
    """Return whether any tensor may belong to a CUDA graph of ``torch.compile``."""
    return _TREES in sys.modules


def belongs_to_graph(tensor: Tensor) -> bool:
    """Return whether a CUDA graph will return this very tensor again, not a view or a copy.

    Those of ``torch.compile(mode="reduce-overhead")`` return the same handle from each replay, to
    save making one, so a handle that has let go of its tensor would come out of the next. torch
    notes them for autograd and for autocast.

    Args:
        tensor: a tensor of any shape, dtype, device and subclass.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/cudagraph_trees.py
    """
    if not has_graph_outputs():
        return False
    ask = optional("torch._C._is_cached_tensor")
    return ask is not None and bool(ask(tensor))
