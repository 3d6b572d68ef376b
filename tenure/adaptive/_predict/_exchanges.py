"""Operations between ranks on tensors without data: nothing is sent, and nobody is waited for.

Invariant: none reaches a process group, so that a rank may predict alone. What arrives has the
shape and the memory of what was made for it; its values are not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tenure._torch.modes import schema_of
from tenure._torch.sharding import done_work

_OF_GROUPS = "c10d"
"""The namespace of operations that are handed to a process group."""
_WAIT = "_c10d_functional.wait_tensor.default"
_NAMESPACES = frozenset({_OF_GROUPS, "_c10d_functional", "_c10d_functional_autograd"})


def is_exchange(func: Any) -> bool:
    """Return whether an operation is one between ranks."""
    return func.namespace in _NAMESPACES


def exchanged(func: Any) -> Callable[..., Any] | None:
    """Return the written tensors and the handle of such an operation.

    None of any other operation.
    """
    # torch's own without data returns a copy
    if str(func) == _WAIT:
        return _waited_for
    if func.namespace != _OF_GROUPS:
        return None
    has_tensors = len(schema_of(func).returns) > 1

    def result(first: Any, *_: Any, **__: Any) -> Any:
        return (first, done_work()) if has_tensors else done_work()

    return result


def _waited_for(tensor: Tensor) -> Tensor:
    return tensor
