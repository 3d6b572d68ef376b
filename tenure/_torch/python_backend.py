"""The private names of torch that the simulated accelerator needs, a device made in Python.

Invariant: the device stays in torch for good, so `require_all` is called before the first change.
"""

from __future__ import annotations

from typing import Any

from . import bound, optional, require

_SIMULATION = "the simulated accelerator"
_names: list[Any] = []


def needed(path: str) -> Any:
    """Bind a private name of torch, as `bound` does, that the simulated accelerator needs."""
    _names.append(bound(path, _SIMULATION))
    return _names[-1]


DeviceGuard: Any = needed("torch._C._acc.DeviceGuard")
create_empty_tensor: Any = needed("torch._C._acc.create_empty_tensor")
set_up: Any = needed("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
name_of_privateuse1: Any = needed("torch._C._get_privateuse1_backend_name")
storage_at: Any = needed("torch._C._construct_storage_from_data_pointer")
DeviceType: Any = needed("torch._C._autograd.DeviceType")
Key: Any = needed("torch._C.DispatchKey")
KeySet: Any = needed("torch._C.DispatchKeySet")
without_keys: Any = needed("torch._C._ExcludeDispatchKeyGuard")
StorageBase: Any = needed("torch.storage._StorageBase")
map_only: Any = needed("torch.utils._pytree.tree_map_only")
without_negative_bit: Any = needed("torch._neg_view")


def require_all() -> None:
    """Make sure that torch has all names.

    Raises:
        MissingTorchNameError: one of them is missing.
    """
    require(*_names)


def replace(path: str, replacement: object) -> None:
    """Assign a new value to a name of torch."""
    owner, _, name = path.rpartition(".")
    setattr(optional(owner), name, replacement)
