"""Scopes leave gradients alone: tried once, at import, because nothing else would say it.

It runs on a thread of its own, where nothing of the program is on: no mode, no scope, no profiler.
Nothing is imported there, because the importing thread has the lock of this package.
"""

from __future__ import annotations

import threading

import torch

from tenure._errors import DisposedTensorError
from tenure._torch.counting import refuse

from ._scope import NewDisposeScope
from ._thread import use_own_scopes

# it takes less than a millisecond; what hangs is not to hang the import
_SECONDS = 10


def check() -> None:
    """Make sure that a gradient outlives the scope in which it was set, or read.

    Raises:
        ImportError: it does not.
    """
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(_are_gradients_kept()), name="tenure self-test", daemon=True
    )
    try:
        thread.start()
    # no thread can be started, as when the interpreter ends
    except RuntimeError:
        return
    thread.join(_SECONDS)
    if found == [False]:
        refuse("a scope disposes gradients that were set or read in it")


def _are_gradients_kept() -> bool:
    use_own_scopes()
    leaf = torch.ones(1, device="cpu", requires_grad=True)
    with NewDisposeScope():
        leaf.grad = torch.zeros(1, device="cpu")
    try:
        with NewDisposeScope():
            gradient = leaf.grad
        return gradient is leaf.grad and gradient.item() == 0
    except DisposedTensorError:
        return False
