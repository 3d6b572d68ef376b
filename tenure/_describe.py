"""How tenure prints a tensor: dtype, shape, device and bytes, whatever kind of tensor it is."""

from collections.abc import Sequence

import torch

from tenure._torch.quiet import without_functions
from tenure._units import format_bytes


def describe(
    dtype: torch.dtype, shape: Sequence[object], device: torch.device | str, n_bytes: int
) -> str:
    """Spell a tensor that may be gone already.

    Example:
        >>> describe(torch.float16, (32, 1024), "cuda:0", 65_536)
        'float16[32, 1024] on cuda:0, 64.0 KiB'
    """
    sizes = ", ".join(map(str, shape))
    return f"{str(dtype).removeprefix('torch.')}[{sizes}] on {device}, {format_bytes(n_bytes)}"


def describe_tensor(t: torch.Tensor) -> str:
    """Spell a tensor of any layout, without running an operation on it.

    Example:
        >>> describe_tensor(torch.zeros(()))
        'float32[] on cpu, 4 B'
    """
    with without_functions():
        return describe(t.dtype, shape_of(t), t.device, n_bytes_of(t))


def shape_of(t: torch.Tensor) -> tuple[int, ...]:
    """The shape; a nested tensor, which has none, shows its number of components."""
    try:
        return tuple(t.shape)
    except RuntimeError:
        return (t.size(0),)


def n_bytes_of(t: torch.Tensor) -> int:
    """Bytes of the storage; without one, of the elements; 0 when neither can be told."""
    for measure in (_storage_bytes, _element_bytes):
        try:
            return measure(t)
        # a subclass may raise anything from its own overrides, and a description must not
        except Exception:
            continue
    return 0


def _storage_bytes(t: torch.Tensor) -> int:
    return int(t.untyped_storage().nbytes())


def _element_bytes(t: torch.Tensor) -> int:
    return int(t.numel()) * int(t.element_size())
