"""What torch keeps to itself of ``nn.Module``: its calls, where it saves itself, and base classes.

torch has hooks for all modules, but compiled code guards on them: what was compiled without is
compiled once more where there are some, and ``torch.compile(module)`` warns. So the call itself is
patched, as torch.fx does while it traces; the patch lingers after a block.

Invariant: no frame is kept: one that is held holds its tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from . import bound, optional, refuse
from .compiler import never_compiled_alone
from .patches import Patch

_NORM = "torch.nn.modules.batchnorm"
# libraries derive layers of theirs from these, and not from BatchNorm1d and its like
BatchNorm: Any = bound(f"{_NORM}._BatchNorm", "step()")
NormBase: Any = bound(f"{_NORM}._NormBase", "buffers that an attempt wrote")
InstanceNorm: Any = bound("torch.nn.modules.instancenorm._InstanceNorm", "step()")

Listener = Callable[[nn.Module, Any], object]
_is_compiled = torch.compiler.is_dynamo_compiling
_CALL = "torch.nn.Module._call_impl"
_UNSAVED = "torch.nn.Module._non_persistent_buffers_set"
_calling: CodeType | None = getattr(optional(_CALL), "__code__", None)
_wrapping = bound("torch.nn.Module._wrapped_call_impl", "paging")
_saving = bound("torch.nn.Module._save_to_state_dict", "state_dict() of a paged model")
_DEPTH_OF_READ = 16
"""Frames from a property, through ``Module.parameters()``, to where the pager is asked."""
_loading = bound("torch.nn.Module._load_from_state_dict", "load_state_dict() of a paged model")


def module_called_by(frame: FrameType) -> nn.Module | None:
    """Return the module whose call ``frame`` is; None if it is none."""
    return frame.f_locals.get("self") if frame.f_code is _calling else None


def module_called_by_torch(frame: FrameType) -> nn.Module | None:
    """Return the module that ``frame`` is about to call, if that is torch's ``__call__``."""
    return frame.f_locals.get("self") if frame.f_code is _wrapping.__code__ else None


def is_called_by_module(frame: FrameType | None) -> bool:
    """Tell whether a module is being called on the stack that a frame ends."""
    while frame is not None and frame.f_code is not _calling:
        frame = frame.f_back
    return frame is not None


def is_saving(frame: FrameType) -> bool:
    """Return whether a frame is that of a module that enters its own tensors into a state dict."""
    return frame.f_code is _saving.__code__


def is_assigning(frame: FrameType, names: Iterable[str]) -> bool:
    """Return whether a frame is of a module that is to register some of these in a state dict."""
    if frame.f_code is not _loading.__code__:
        return False
    found = frame.f_locals
    if not found["local_metadata"].get("assign_to_params_buffers"):
        return False
    caller = frame.f_back
    while caller is not None and caller.f_code.co_name != "load":
        caller = caller.f_back
    # torch leaves it in the state dict, for calls to come that do not ask for it
    if caller is not None and not caller.f_locals.get("assign", True):
        del found["local_metadata"]["assign_to_params_buffers"]
        return False
    return any(found["prefix"] + name in found["state_dict"] for name in names)


def is_asking_where(frame: FrameType | None) -> bool:
    """Return whether a module's own ``device`` or ``dtype`` runs on the stack that a frame ends.

    Models of transformers and diffusers have these properties, which read a parameter.
    """
    for _ in range(_DEPTH_OF_READ):
        if frame is None:
            return False
        if frame.f_code.co_name in ("device", "dtype"):
            return isinstance(frame.f_locals.get("self"), nn.Module)
        frame = frame.f_back
    return False


class _CallsOfThread(threading.local):
    listeners: tuple[tuple[Container[int], Listener, Listener | None], ...] = ()


_this_thread = _CallsOfThread()
_NOTHING = (None, None)


@contextmanager
def modules_told(
    called: Listener, returned: Listener | None = None, known: Container[int] = ()
) -> Iterator[None]:
    """Return a block in which ``called`` gets each module that this thread calls, before it runs.

    It also gets what the module is called with, and ``returned`` what it returns. Modules that run
    inside compiled code are not told. Where blocks nest, each is told. Mark both functions with
    `never_compiled`: compiled code that broke its graph may call a module.

    Args:
        called: gets a module, and the arguments of its call.
        returned: gets a module, and what it returns.
        known: the identities of modules that ``called`` need not get; asked at each call.
    """
    listener = known, called, returned
    _calls.begin()
    try:
        _this_thread.listeners = (listener, *_this_thread.listeners)
        yield
    finally:
        # blocks may end in any order, and on another thread; by identity, as `known` may be equal
        rest = [each for each in _this_thread.listeners if each is not listener]
        _this_thread.listeners = tuple(rest)
        _calls.end()


def _telling(call: Any) -> Any:
    @never_compiled_alone
    @functools.wraps(call)
    def told_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # dynamo folds the first condition, and sees a plain call; else as `is_current`, which would
        # be one more call at each module
        if _is_compiled() or _calls.replaced.get("__call__", _NOTHING)[1] is not told_call:
            return call(self, *args, **kwargs)
        listeners = _this_thread.listeners
        if not listeners:
            _calls.was_called()
        for known, called, _ in listeners:
            if id(self) not in known:
                called(self, (args, kwargs))
        result = call(self, *args, **kwargs)
        for _, _, returned in listeners:
            if returned is not None:
                returned(self, result)
        return result

    return told_call


_calls = Patch(nn.Module, {"__call__": _telling}, lingers=True)


def unsaved_names(module: nn.Module) -> set[str]:
    """Return the names of the buffers that no state dict has."""
    names: set[str] | None = getattr(module, "_non_persistent_buffers_set", None)
    if names is None:
        refuse(_UNSAVED, "load_into()")
    return names
