"""Copies: within the device, and over the link between the device and the host.

A copy over the link is asynchronous only if the caller asks for it, the host side is pinned, and
both sides have one type and one dense layout: CUDA takes any other copy through pageable memory.
Otherwise the host waits for the stream.
"""

import torch

from ._blocks import is_on_device, on_host, span_of
from ._dispatch import kernel, require_first_device
from ._fallback import run_as
from ._machine import machine
from ._pinned import extent_bytes, pinned_memory
from ._streams import current_stream
from ._torch_backend import operator_named


@kernel
def copy_from(
    source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Kernel of `aten::_copy_from`, which `copy_` comes down to."""
    if not is_on_device(destination):
        _copy_out(source, destination, non_blocking=non_blocking)
    elif not is_on_device(source):
        _copy_in(source, destination, non_blocking=non_blocking)
    else:
        _copy_within(source, destination)
    return destination


@kernel
def copy_from_and_resize(source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """Kernel of `aten::_copy_from_and_resize`."""
    destination.resize_(source.size())
    return destination.copy_(source)


@kernel
def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Kernel of `aten::_to_copy`: converts on the side of the source, then moves."""
    require_first_device(device)
    target = device or tensor.device
    source = tensor if dtype in (None, tensor.dtype) else _convert(tensor, dtype)
    if source is not tensor and source.device.type == target.type:
        return source
    order = memory_format or torch.preserve_format
    result = torch.empty_like(source, memory_format=order, device=target)
    if target.type == "meta":
        return result
    if non_blocking and target.type == "cpu":
        pinned_memory.pin_storage(result)  # as on CUDA, which allocates such results pinned
    return result.copy_(source, non_blocking)


@kernel
def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Kernel of `aten::record_stream`: keep the block until `stream` has passed its last use."""
    history = span_of(tensor).history
    if stream.stream_id != history.home_stream_id:
        history.recorded_stream_ids.add(stream.stream_id)


@kernel
def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Kernel of `aten::_pin_memory` for host tensors."""
    return pinned_memory.pin_storage(torch.empty_like(tensor).copy_(tensor))


@kernel
def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Kernel of `aten::is_pinned` for host tensors."""
    return pinned_memory.is_pinned(tensor)


def _convert(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if not is_on_device(tensor):
        return tensor.to(dtype)
    operator = operator_named("_to_copy")
    return run_as(operator, operator, (tensor,), {"dtype": dtype})


def _copy_within(source: torch.Tensor, destination: torch.Tensor) -> None:
    stream = current_stream()
    on_host(destination).copy_(on_host(source))
    machine.launch("aten::copy_", stream, [span_of(source)], [span_of(destination)])
    n_bytes = source.nbytes + destination.nbytes
    machine.clock.launch_kernel(stream, 0, n_bytes)


def _copy_in(source: torch.Tensor, destination: torch.Tensor, *, non_blocking: bool) -> None:
    stream, span = current_stream(), pinned_memory.span(source)
    machine.launch("aten::copy_", stream, [span] if span else [], [span_of(destination)])
    machine.host_copies.deliver(stream.seen)
    on_host(destination).copy_(source)
    pinned = span is not None and _same_layout(source, destination)
    machine.clock.launch_copy(stream, "h2d", destination.nbytes, pinned=pinned)
    if pinned and non_blocking:
        machine.host_copies.send(source, stream.stream_id, stream.seen)
    else:
        stream.synchronize()


def _copy_out(source: torch.Tensor, destination: torch.Tensor, *, non_blocking: bool) -> None:
    stream, span = current_stream(), pinned_memory.span(destination)
    machine.launch("aten::copy_", stream, [span_of(source)], [span] if span else [])
    machine.host_copies.deliver(stream.seen)
    pinned = span is not None and _same_layout(source, destination)
    n_bytes = destination.numel() * source.element_size()  # the host converts what arrives
    machine.clock.launch_copy(stream, "d2h", n_bytes, pinned=pinned)
    if pinned and non_blocking:
        machine.host_copies.receive(destination, on_host(source), stream.stream_id, stream.seen)
    else:
        destination.copy_(on_host(source))
        stream.synchronize()


def _same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    # copy_requires_temporaries in aten/src/ATen/native/cuda/Copy.cu
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    return first.stride() == second.stride() and extent_bytes(first) == first.nbytes


DEVICE_KERNELS = {
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_to_copy": to_copy,
    "record_stream": record_stream,
}

HOST_KERNELS = {"_pin_memory": pin_memory, "is_pinned": is_pinned}

# Torch resolves a lazy conjugate or negative by copying; the copy itself must take it as it is.
LAZY_KEYS = ("Conjugate", "Negative")
LAZY_KERNELS = {"_copy_from": torch.library.fallthrough_kernel}
