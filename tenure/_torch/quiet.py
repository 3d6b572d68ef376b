"""Asking and copying tensors so that no mode, no subclass, no graph and no profiler gets to see it.

Which block to take: ``without_functions`` where only Python above the dispatcher is to keep out
(the cheapest), ``quietly`` for questions and small operations, ``aside`` for copies that also no
graph and no transform may record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import bound

_ALL = "everything that looks at tensors"

without_functions: Any = bound("torch._C.DisableTorchFunction", _ALL)
"""A context in which neither function modes nor ``__torch_function__`` of subclasses run."""
without_subclass_functions: Any = bound(
    "torch._C.DisableTorchFunctionSubclass", "what is done with tensors that are away"
)
"""A context in which ``__torch_function__`` of subclasses does not run, and modes do."""
without_dispatch: Any = bound(
    "torch._C._DisableTorchDispatch",
    "paging, memory_budget(), predictions of memory, reports of tenure.profiler and who holds what",
)
"""A context in which operations run below all dispatch modes and subclasses."""
TENSOR_BASE: Any = torch.Tensor.__mro__[-2]
"""The class whose getters no subclass has replaced; they take the tensor by ``__get__``."""
set_class = vars(object)["__class__"].__set__
"""Gives an object another class, past a ``__setattr__`` of its own; TypeError where it can't."""

_ASIDE = "paging, predictions of memory and figures by line of tenure.profiler"
_without_transforms = bound("torch._C._DisableFuncTorch", _ASIDE)
without_dispatch_modes: Any = bound("torch.utils._python_dispatch._disable_current_modes", _ASIDE)
"""A context in which no dispatch mode sees an operation."""


@contextmanager
def quietly() -> Iterator[None]:
    """Return a block in which neither modes nor overrides of subclasses run."""
    with without_functions(), without_dispatch():
        yield


@contextmanager
def aside() -> Iterator[None]:
    """Return a block whose tensors no scope owns, no mode sees and no graph or transform records.

    For plain tensors: a subclass that is made of others does nothing of its own here.
    """
    # FakeTensorMode, for one, would give copies no address
    with without_dispatch(), _unrecorded():
        yield


@contextmanager
def aside_with_subclasses() -> Iterator[None]:
    """Return the same for tensors of any class: without own dispatch they have no bytes."""
    with without_dispatch_modes(), _unrecorded():
        yield


@contextmanager
def _unrecorded() -> Iterator[None]:
    # without transforms: torch.func wraps what is made inside of it
    with (
        without_functions(),
        _without_transforms(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield
