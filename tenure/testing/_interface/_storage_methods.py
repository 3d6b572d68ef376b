"""Making, copying and locating whole storages, which torch does without its dispatcher.

`copy.deepcopy`, `torch.load` and pickle come through here. Python has no allocator to give to torch
(`torch.UntypedStorage(n, device="sim")` ends the process), so what makes a storage is led to the
device's own; in place a storage can only be emptied and, later, filled again.

`data_ptr()` agrees with `memory_snapshot()`: the caching allocator knows addresses as numbers, and
these are the answer, while C++ sees the host memory that stands for them, the answer where exact.
"""

from typing import Any

import torch

from tenure._torch.python_backend import StorageBase

from .._device._blocks import (
    address_of,
    allocate_bytes,
    empty_block,
    has_block,
    is_on_device,
    n_bytes_of,
    refill_block,
)
from .._device._which import index_of
from .._torch_backend import DEVICE_TYPE


def install() -> None:
    """Replace the constructor, `new`, `clone`, `resize_`, and what tells of sizes and addresses."""
    torch.UntypedStorage.__new__ = _constructor()  # type: ignore[method-assign]
    torch.UntypedStorage.new = _renewer()  # type: ignore[method-assign]
    StorageBase.clone = _cloner()
    torch.UntypedStorage.resize_ = _resizer()  # type: ignore[method-assign]
    torch.UntypedStorage.resizable = _resizability()  # type: ignore[method-assign]
    for name in ("nbytes", "size"):
        setattr(torch.UntypedStorage, name, _sizer(name))
    torch.UntypedStorage.data_ptr = _storage_locator()  # type: ignore[method-assign]
    torch.Tensor.data_ptr = _tensor_locator()  # type: ignore[method-assign]


def _constructor() -> Any:
    plain: Any = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return plain(cls, *args, **kwargs)
        target = torch.device(device)
        if target.type != DEVICE_TYPE:
            return plain(cls, *args, device=device, **kwargs)
        return allocate_bytes(args[0] if args else 0, index_of(target))

    return staticmethod(new)


def _renewer() -> Any:
    plain = torch.UntypedStorage.new

    def new(storage: torch.UntypedStorage) -> Any:
        if storage.device.type != DEVICE_TYPE:
            return plain(storage)
        return torch.UntypedStorage(0, device=storage.device)

    return new


def _cloner() -> Any:
    plain: Any = StorageBase.clone

    def clone(storage: Any) -> Any:
        if storage.device.type != DEVICE_TYPE:
            return plain(storage)
        return torch.UntypedStorage(storage.nbytes(), device=storage.device).copy_(storage)

    return clone


def _sizer(name: str) -> Any:
    plain = getattr(torch.UntypedStorage, name)

    def size(storage: torch.UntypedStorage) -> int:
        n_bytes = n_bytes_of(storage)
        return plain(storage) if n_bytes is None else n_bytes

    return size


def _resizability() -> Any:
    plain = torch.UntypedStorage.resizable

    def resizable(storage: torch.UntypedStorage) -> bool:
        return has_block(storage) or plain(storage)

    return resizable


def _resizer() -> Any:
    plain: Any = torch.UntypedStorage.resize_
    full_size = torch.UntypedStorage.nbytes

    def resize_(storage: torch.UntypedStorage, n_bytes: int) -> Any:
        if storage.device.type != DEVICE_TYPE:
            return plain(storage, n_bytes)
        if n_bytes == 0:
            empty_block(storage)
        elif n_bytes == full_size(storage):
            refill_block(storage)
        else:
            raise NotImplementedError(
                f"a storage on {storage.device} cannot be resized in place but to 0 bytes and back"
                " (torch gives a Python device no hook for it); Tensor.resize_ works, with a new"
                " storage where it grows."
            )
        return storage

    return resize_


def _storage_locator() -> Any:
    plain = torch.UntypedStorage.data_ptr

    def data_ptr(self: torch.UntypedStorage) -> int:
        address = address_of(self)
        return plain(self) if address is None else address

    return data_ptr


def _tensor_locator() -> Any:
    plain = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        # The plain one first: it refuses a tensor without storage, in torch's own words.
        lies_at = plain(self)
        address = address_of(self.untyped_storage()) if lies_at and is_on_device(self) else None
        if address is None:
            return lies_at
        return address + int(self.storage_offset()) * self.element_size()

    return data_ptr
