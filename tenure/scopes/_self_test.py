"""Check once, at import, that scopes leave gradients alone, because no error would say that.

The check runs on a thread of its own, because there no mode, scope or profiler of the program is
on. It must import nothing, because the importing thread holds the lock of this package.
"""

from __future__ import annotations

import threading

import torch

from tenure._errors import DisposedTensorError
from tenure._torch.counting import refuse_import

from ._scope import NewDisposeScope
from ._thread import use_own_scopes

# It takes less than a millisecond. If it hangs, the import goes on.
_TIMEOUT_S = 10


def check() -> None:
    """Make sure that a gradient outlives the scope in which it was set, or read.

    Raises:
        ImportError: it does not.
    """
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(_are_gradients_kept()), name="tenure self-test", daemon=True
    )
    thread.start()
    thread.join(_TIMEOUT_S)
    if found == [False]:
        refuse_import("a scope disposes gradients that were set or read in it")


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
