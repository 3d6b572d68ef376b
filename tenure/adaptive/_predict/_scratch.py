"""The memory that a real kernel takes on the CPU: its own, and its results'."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._containers import passed_tensors
from tenure._torch.modes import schema_of
from tenure._torch.storages import key_of

from ._device import OF_GROUPS, bytes_of
from ._measured import KernelRun, layout_of, mapped, measured, peak_of
from ._values import is_exchange

_aten = torch.ops.aten


class Inside(NamedTuple):
    """The memory that a kernel takes while it runs, and its results as it lays them out.

    Attributes:
        n_bytes: the peak of what is live inside of it, beyond its inputs and its outputs.
        result: the results of the operation, with the memory that the real ones have.
        reason: None if that is exact or a little too high; else why it is only an estimate.
        is_kept: whether a thread frees it later: when the second one after it has some.
    """

    n_bytes: int
    result: Any
    reason: str | None = None
    is_kept: bool = False


_BY_THREADS = "threads that exchange with other ranks free memory at moments of their own"
_SEES_VALUES = frozenset({_aten.isin.Tensor_Tensor})
_HALVES = frozenset({torch.bfloat16, torch.float16})
_BY_ONEDNN = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.convolution.default, _aten.convolution_backward.default),
        *(_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default),
    }
)

# They take nothing else; a smaller problem would have the strides of the whole one.
_BY_STRIDES = frozenset({_aten.empty_strided.default, _aten.new_empty_strided.default})

_MOST_KNOWN = 4096
"""Signatures that are kept, because sizes that differ in each call would pile up."""
_known: dict[Any, KernelRun | str] = {}


def inside(func: Any, args: Any, kwargs: Any, result: Any) -> Inside:
    """Say what the real kernel of an operation allocates on the CPU.

    Args:
        func: an operation, as a dispatch mode gets it.
        args: its arguments; of tensors, which may be fake, only their layouts are looked at.
        kwargs: its arguments by name.
        result: what it gave; storages in it that are not in the arguments count as its outputs.
    """
    if func.namespace in {"profiler", "prim"} or func in _BY_STRIDES or _is_view(func):
        return Inside(0, result)
    if is_exchange(func):
        return Inside(_exchange_bytes(func, args, kwargs, result), result, _BY_THREADS, True)
    tensors = [*passed_tensors((args, kwargs, result))]
    is_strange = func.namespace not in {"aten", "fsdp"}
    if is_strange or any(each.layout is not torch.strided for each in tensors):
        return Inside(0, result, f"nobody has measured what {func} takes for itself")
    known = _measured_once(func, args, kwargs, result)
    if isinstance(known, str):
        return Inside(0, result, f"what {func} takes for itself can't be measured ({known})")
    n_bytes = max(0, peak_of(known.events) - sum(known.made_bytes))
    reason = None
    if func in _SEES_VALUES:
        reason = f"what {func} takes for itself depends on the values that it gets"
    if known.is_grown and func in _BY_ONEDNN and any(each.dtype in _HALVES for each in tensors):
        reason = f"what {func} takes for itself grows in steps for 16 bits"
        # Steps on small sizes look like a power of them. Seen is up to 0.7 of what it reads and
        # writes; it can't take more than a copy of all in 32 bits.
        n_bytes = min(n_bytes, 2 * bytes_of(tensors))
    # else values decide how large the results are
    if torch.Tag.dynamic_output_shape not in func.tags:
        result = _as_made(known, args, kwargs, result)
    return Inside(n_bytes, result, reason)


def _is_view(func: Any) -> bool:
    schema = schema_of(func)
    # a higher-order operator has none
    if schema is None or schema.is_mutable:
        return False
    return any(each.alias_info is not None for each in schema.returns)


def _measured_once(func: Any, args: Any, kwargs: Any, result: Any) -> KernelRun | str:
    mkldnn: Any = torch.backends.mkldnn
    key = (
        func,
        repr(mapped((tuple(args), dict(kwargs)), layout_of)),
        # what kernels are chosen by besides their arguments
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        # the function for all backends raises after a setting of one, such as the Trainer's tf32=
        mkldnn.matmul.fp32_precision,
    )
    if (known := _known.get(key)) is None:
        try:
            known = measured(func, args, kwargs, result)
        except Exception as error:
            known = f"{type(error).__name__}: {error}".splitlines()[0]
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known


def _as_made(run: KernelRun, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the results with the strides and the storages of the real ones."""
    made = zip(run.made, run.made_bytes, strict=True)
    before = {key_of(each.untyped_storage()) for each in passed_tensors((args, kwargs))}
    seen = {*before}

    def remade(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        layout, n_bytes = next(made, (None, 0))
        key = key_of(leaf.untyped_storage())
        is_seen = key in seen
        seen.add(key)
        if layout is None or key in before:
            return leaf
        if len(layout.shape) != leaf.dim():
            # up to torch 2.12, fakes give the bias that an LSTM lacks the size of a weight
            is_flat = len(layout.shape) == 1
            return leaf.new_empty(n_bytes // leaf.element_size()) if is_flat else leaf
        stride = layout.resized(leaf.shape).stride
        least_bytes = leaf.untyped_storage().nbytes()
        if stride == leaf.stride() and n_bytes <= least_bytes and not is_seen:
            return leaf
        n_elements = max(n_bytes, least_bytes) // leaf.element_size()
        return leaf.new_empty(n_elements).as_strided(leaf.shape, stride)

    return mapped(result, remade)


def _exchange_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return what gloo takes: it gathers into a buffer of its own, and reduces a copy."""
    name = func.overloadpacket.__name__.replace("_", "")
    is_functional = func.namespace != OF_GROUPS
    if name.startswith("allgather"):
        return bytes_of(result if is_functional else args[0])
    if name.startswith("reducescatter"):
        return bytes_of(args[0] if is_functional else args[1])
    return 0
