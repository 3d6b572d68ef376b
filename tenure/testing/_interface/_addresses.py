"""Where device memory lies, as a program may ask: `data_ptr()` agrees with `memory_snapshot()`.

The caching allocator knows addresses as numbers, while C++ sees the host memory that stands for
them. So these two methods answer with the number; where exact, the host's address is the answer.
"""

from typing import Any

import torch

from .._device._blocks import address_of, is_on_device


def install() -> None:
    """Replace `data_ptr` of storages and of tensors."""
    torch.UntypedStorage.data_ptr = _of_storages()  # type: ignore[method-assign]
    torch.Tensor.data_ptr = _of_tensors()  # type: ignore[method-assign]


def _of_storages() -> Any:
    plain = torch.UntypedStorage.data_ptr

    def data_ptr(self: torch.UntypedStorage) -> int:
        address = address_of(self)
        return plain(self) if address is None else address

    return data_ptr


def _of_tensors() -> Any:
    plain = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        lies_at = plain(self)  # and raises what it raises
        address = address_of(self.untyped_storage()) if lies_at and is_on_device(self) else None
        if address is None:
            return lies_at
        return address + int(self.storage_offset()) * self.element_size()

    return data_ptr
