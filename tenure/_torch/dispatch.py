"""What torch keeps to itself about its dispatcher, and a test of it: modes and use counts.

Modes are run from the top of a stack that each thread has; torch pops them by position.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

_C: Any = torch._C
_length = _C._len_torch_dispatch_stack
_at = _C._get_dispatch_stack_at
_n_uses = _C._storage_Use_Count

without_functions = _C.DisableTorchFunction
"""A context in which neither function modes nor ``__torch_function__`` of subclasses run."""
without_dispatch = _C._DisableTorchDispatch
"""A context in which operations run below all dispatch modes and subclasses."""


def open_modes() -> list[TorchDispatchMode]:
    """The modes that the program has open on this thread, the innermost last."""
    stack = (_at(i) for i in range(_length()))
    return [mode for mode in stack if not mode.is_infra_mode()]


@functools.cache
def uses_by_torch(inference: bool) -> int:
    """How often torch itself uses a storage on its way to the handler of ``set_``.

    To be asked outside of handlers. A mode above the handler adds one, a tensor in the storage too.
    """
    probe = _UseProbe()
    with torch.inference_mode(inference), probe:
        _put_in_a_tensor(UntypedStorage(1))
    return probe.n_uses


def is_held(storage: UntypedStorage, inference: bool, n_modes_above: int) -> bool:
    """Whether a tensor lies in ``storage``, asked in the handler of ``set_``."""
    return int(_n_uses(storage._cdata)) > uses_by_torch(inference) + n_modes_above


def works() -> bool:
    """Whether a storage that a tensor lies in is used once more than one that is fresh."""
    storage, probe = UntypedStorage(1), _UseProbe()
    holder = _put_in_a_tensor(storage)
    with probe:
        _put_in_a_tensor(storage)
    return probe.n_uses == uses_by_torch(False) + 1 and holder.untyped_storage() is storage


class _UseProbe(TorchDispatchMode):
    """Notes how often the storage given to ``set_`` was used when the handler got it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it unannotated
        self.n_uses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.set_.source_Storage:
            self.n_uses = int(_n_uses(args[1]._cdata))
        return func(*args, **(kwargs or {}))


def _put_in_a_tensor(storage: UntypedStorage) -> torch.Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    tensor: torch.Tensor = empty.set_(storage)
    return tensor
