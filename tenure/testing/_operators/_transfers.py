"""Copies: within the device, and over the link between the device and the host.

A copy over the link is asynchronous only if the caller asks for it, the host side is pinned, and
both sides have one type and one dense layout: CUDA takes any other copy through pageable memory.
Otherwise the host waits for the stream.
"""

from typing import Any

import torch

from tenure._text import describe_tensor

from .._allocator._runtime import last_error
from .._device._blocks import block_of, is_on_device, on_host, span_of
from .._device._clock import Engine
from .._device._host_memory import extent_bytes, pinned_memory
from .._device._machine import machine
from .._device._streams import current_stream, number_of
from .._device._which import context_for_pinning, index_of
from .._torch_backend import DEVICE_TYPE, kernel, operator_named, sim_device
from ._fallback import run_on_host

_COPY, _TO_COPY = torch.ops.aten.copy_.default, operator_named("_to_copy")


@kernel("_copy_from")
def copy_from(
    source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy; `copy_` comes down to this."""
    if is_on_device(source) and is_on_device(destination):
        _copy_within(source, destination)
    else:
        _copy_over_link(source, destination, non_blocking=non_blocking)
    return destination


@kernel("_copy_from_and_resize")
def copy_from_and_resize(source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """Copy, to as many elements as there are."""
    destination.resize_(source.size())
    return destination.copy_(source)


@kernel("_to_copy")
def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
    **unused: Any,
) -> torch.Tensor:
    """Convert on the side of the source, then move."""
    target = tensor.device if device is None else device
    if target.type == DEVICE_TYPE:
        target = sim_device(index_of(target))
    source = tensor
    if dtype not in (None, tensor.dtype):
        on_side = is_on_device(tensor)
        source = run_on_host(_TO_COPY, tensor, dtype=dtype) if on_side else tensor.to(dtype)
    if source is not tensor and source.device == target:
        return source
    order = memory_format or torch.preserve_format
    result = torch.empty_like(source, memory_format=order, device=target)
    if target.type == "meta":
        return result
    if non_blocking and target.type == "cpu":
        # As on CUDA, which allocates such results pinned.
        pinned_memory.pin_storage(result)
    return result.copy_(source, non_blocking)


@kernel("record_stream")
def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Keep the block until `stream` has passed its last use.

    CUDA's allocator ignores storages that are not its own, and tells nobody.
    """
    if block_of(tensor.untyped_storage()) is None:
        if machine.detector.enabled:
            machine.detector.faults.append(
                f"record_stream() of {describe_tensor(tensor)} does nothing: its storage was made "
                "over memory of another one, as by DLPack, and the allocator does not know it. "
                "Call it for a tensor of the other storage, or wait for the stream."
            )
        return
    history, number = span_of(tensor).history, number_of(stream)
    if number != history.home_stream_id:
        history.recorded_stream_ids.add(number)


@kernel("_pin_memory", keys=["CPU"])
def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Copy a host tensor into memory that is pinned."""
    context_for_pinning()
    return pinned_memory.pin_storage(torch.empty_like(tensor).copy_(tensor))


@kernel("is_pinned", keys=["CPU"])
def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Return whether a host tensor is pinned."""
    return pinned_memory.span(tensor) is not None


def _copy_within(source: torch.Tensor, destination: torch.Tensor) -> None:
    if source.device == destination.device:
        run_on_host(_COPY, destination, source)
        return
    # Between two devices the source's stream copies, and the two streams wait for each other
    # before and after: copy_device_to_device in aten/src/ATen/native/cuda/Copy.cu.
    stream, beside = current_stream(source.device), current_stream(destination.device)
    stream.wait_stream(beside)
    on_host(destination).copy_(on_host(source))
    machine.launch(_COPY.name(), stream, [span_of(source)], [span_of(destination)])
    machine.clock.launch_kernel(stream, 0, source.nbytes + destination.nbytes)
    beside.wait_stream(stream)
    last_error.check()


def _copy_over_link(source: torch.Tensor, destination: torch.Tensor, *, non_blocking: bool) -> None:
    engine: Engine = "d2h" if is_on_device(source) else "h2d"
    host, there = (destination, source) if engine == "d2h" else (source, destination)
    stream, span = current_stream(there.device), pinned_memory.span(host)
    pinned = span is not None and _same_layout(source, destination)
    on_both = [[span_of(there)], [span] if span else []]
    reads, writes = on_both if engine == "d2h" else reversed(on_both)
    machine.launch(_COPY.name(), stream, reads, writes)
    # The host converts.
    n_bytes = destination.numel() * there.element_size()
    machine.clock.launch_copy(stream, engine, n_bytes, pinned=pinned)
    alias = on_host(there)
    out_of, into = (alias, destination) if engine == "d2h" else (source, alias)
    if not (pinned and non_blocking):
        stream.synchronize()
        into.copy_(out_of)
    elif engine == "d2h":
        machine.host_copies.receive(into, out_of, stream.number, stream.seen)
    else:
        machine.host_copies.deliver(stream.seen, source)
        into.copy_(out_of)
        machine.host_copies.send(source, stream.number, stream.seen)


def _same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    # copy_requires_temporaries in aten/src/ATen/native/cuda/Copy.cu
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    return first.stride() == second.stride() and extent_bytes(first) == first.nbytes
