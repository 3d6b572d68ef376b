"""The bytes of tensors and storages on the host, whatever their type and strides."""

import torch

POISON = 0xFF
"""What memory holds that nothing has written yet: NaN for floats, so that reading it is loud."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8[*size, bytes of an element], whatever the strides."""
    width = tensor.element_size()
    strides = (*(step * width for step in tensor.stride()), 1)
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    offset = int(tensor.storage_offset()) * width
    return raw.set_(tensor.untyped_storage(), offset, (*tensor.shape, width), strides)


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """All memory of a storage as uint8[bytes]."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
