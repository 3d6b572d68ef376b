"""Making, copying and locating whole storages, which torch does without its dispatcher.

`copy.deepcopy`, `torch.load` and pickle come through here. Python has no allocator to give to torch
(`torch.UntypedStorage(n, device="sim")` ends the process), so what makes a storage is led to the
device's own; in place a storage can only be emptied and, later, filled again.

`data_ptr()` agrees with `memory_snapshot()`: the caching allocator knows addresses as numbers, and
these are the answer, while C++ sees the host memory that stands for them, the answer where exact.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tenure._torch.python_backend import StorageBase

from .._device._blocks import (
    address_of,
    allocate_bytes,
    block_of,
    empty_block,
    is_on_device,
    refill_block,
)
from .._device._which import index_of
from .._torch_backend import DEVICE_TYPE


def install() -> None:
    """Replace the constructor, `new`, `clone`, `resize_`, and what tells of sizes and addresses."""
    storages: Any = torch.UntypedStorage
    storages.__new__ = _constructor()
    storages.new = _on_device(_new, storages.new)
    StorageBase.clone = _on_device(_clone, StorageBase.clone)
    storages.resize_ = _on_device(partial(_resize, storages.nbytes), storages.resize_)
    storages.resizable = _known(lambda storage: block_of(storage) and True, storages.resizable)
    for name in ("nbytes", "size"):
        setattr(storages, name, _known(_size_if_empty, getattr(storages, name)))
    storages.data_ptr = _known(address_of, storages.data_ptr)
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


def _on_device(run: Callable[..., Any], plain: Any) -> Any:
    """Return a method that is another for storages of the device."""

    def method(storage: Any, *args: Any) -> Any:
        return (run if storage.device.type == DEVICE_TYPE else plain)(storage, *args)

    return method


def _known(answer: Callable[[torch.UntypedStorage], Any], plain: Any) -> Any:
    """Return a method that torch answers where the device does not."""

    def method(storage: torch.UntypedStorage) -> Any:
        found = answer(storage)
        return plain(storage) if found is None else found

    return method


def _size_if_empty(storage: torch.UntypedStorage) -> int | None:
    return 0 if getattr(block_of(storage), "is_empty", False) else None


def _new(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=storage.device)


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device=storage.device).copy_(storage)


def _resize(full_size: Any, storage: torch.UntypedStorage, n_bytes: int) -> torch.UntypedStorage:
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
