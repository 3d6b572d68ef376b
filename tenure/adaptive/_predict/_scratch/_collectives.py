"""What operations between ranks take for themselves, on the CPU, where gloo does them.

Measured with gloo at 2 and 4 ranks: it gathers into a buffer of its own, and reduces a copy. Its
threads let go of that a little after the operation, while others run already.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tenure._containers import passed_tensors

_COPIES = "fsdp"


def is_copy(func: Any) -> bool:
    """Whether an operation copies what ranks exchange, before or after that."""
    return bool(func.namespace == _COPIES)


def collective_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes beside inputs and outputs; of one that nobody knows, those of what it is given."""
    name = func.overloadpacket.__name__
    if is_copy(func):
        return _chunk_cat(args[0], args[2], kwargs["out"]) if name == "chunk_cat" else 0
    if name in _NOTHING:
        return 0
    if name.startswith(_GATHERING):
        return _total(result if func.namespace != "c10d" else args[0])
    if name.startswith(_REDUCING):
        return _total(args[0] if func.namespace != "c10d" else args[1])
    return _total((args, kwargs))


_GATHERING = ("_allgather", "allgather", "all_gather")
_REDUCING = ("_reduce_scatter", "reduce_scatter")
_NOTHING = frozenset(
    {
        "all_reduce", "all_reduce_", "all_to_all_single", "allreduce_", "alltoall_base_", "barrier",
        "broadcast", "broadcast_", "monitored_barrier_", "recv_", "recv_any_source_", "reduce_",
        "send", "wait_tensor",
    }
)  # fmt: skip


def _total(tree: object) -> int:
    return sum(_n_bytes(each) for each in passed_tensors(tree))


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _chunk_cat(tensors: Iterable[Tensor], n_chunks: int, out: Tensor) -> int:
    """All with their padding, where one has some; and one more, where another type is wanted."""
    tensors = list(tensors)
    sizes = [_padded(each, n_chunks) * each.element_size() for each in tensors]
    is_padded = any(each.shape[0] % n_chunks for each in tensors)
    is_other = any(each.dtype != out.dtype for each in tensors)
    return sum(sizes) * is_padded + max(sizes) * is_other


def _padded(tensor: Tensor, n_chunks: int) -> int:
    return -(-tensor.shape[0] // n_chunks) * n_chunks * tensor.shape[1:].numel()
