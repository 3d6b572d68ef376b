"""Device memory: host buffers that stand for it, and the tensors over them.

A block is one storage on the device. It is accounted from `adopt` until that storage dies, so
views, autograd and C++ owners all keep it allocated, as on a real device.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tenure._text import format_bytes_as_torch
from tenure._torch.python_backend import without_negative_bit
from tenure._torch.storages import key_of

from .._allocator import MemoryPool
from .._torch_backend import (
    DEVICE_TYPE,
    sim_device,
    storage_over,
    tensor_key,
    tensor_over,
)
from ._host_memory import POISON, bytes_in, extent_bytes
from ._machine import machine
from ._races import History, RaceDetector, Span, merge_clocks
from ._streams import current_stream


@dataclass(slots=True)
class DeviceBlock:
    """One storage of the device and the host memory that holds its bytes."""

    buffer: torch.UntypedStorage
    n_bytes: int
    pool: MemoryPool
    taken: Any
    home_stream: Any
    history: History
    detector: RaceDetector
    is_empty: bool = False


@dataclass(slots=True)
class Window:
    """A storage over part of a block, which owns none of it: made by DLPack or by pickling.

    Its accesses count as those of the block, `low` bytes further on.
    """

    block: DeviceBlock
    buffer: torch.UntypedStorage
    low: int
    n_bytes: int


_blocks: dict[int, DeviceBlock] = {}
_windows: dict[int, Window] = {}


def is_on_device(value: object) -> bool:
    """Return whether `value` is a tensor on a simulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def room_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that the storage of a device tensor has."""
    return _window_of(tensor).n_bytes


def block_of(storage: torch.UntypedStorage) -> DeviceBlock | None:
    """Return the memory of the device that this storage owns."""
    return _blocks.get(key_of(storage))


def address_of(storage: torch.UntypedStorage) -> int | None:
    """Return the place of a storage in the caching allocator; None in exact mode."""
    return getattr(getattr(block_of(storage), "taken", None), "address", None)


def live_blocks() -> list[DeviceBlock]:
    """Return the blocks whose bytes are allocated on the machine as it was last started."""
    blocks, pools = list(_blocks.values()), [device.pool for device in machine.devices]
    return [b for b in blocks if b.n_bytes and not b.is_empty and b.pool in pools]


def empty_block(storage: torch.UntypedStorage) -> None:
    """Let go of the bytes of a storage that lives on; using them raises until `refill_block`."""
    block = _blocks[key_of(storage)]
    if not block.is_empty:
        _free(block)
        block.is_empty = True
        bytes_in(block.buffer).fill_(POISON)


def refill_block(storage: torch.UntypedStorage) -> None:
    """Allocate the bytes of an emptied storage again, on the current stream; they are undefined.

    Raises:
        torch.OutOfMemoryError: they do not fit, and the storage stays empty.
    """
    block = _blocks[key_of(storage)]
    if block.is_empty:
        index = storage.device.index
        (block.taken,) = reserve([block.n_bytes], index)
        block.pool, block.detector = machine.devices[index].pool, machine.detector
        block.home_stream = current_stream(index)
        block.history = History(block.home_stream.number)
        block.is_empty = False


def reserve(sizes: Iterable[int], index: int) -> list[Any]:
    """Account several allocations for a device's current stream: all or, if one fails, none.

    Returns:
        What the pool gave for each, in the same order, for `adopt`.

    Raises:
        torch.OutOfMemoryError: one of them failed.
        torch.AcceleratorError: an error was left behind in this thread; a new segment looks for it.
    """
    pool, stream, done = machine.devices[index].pool, current_stream(index), []
    machine.devices[index].has_context = True
    try:
        for n_bytes in sizes:
            taken = pool.allocate(n_bytes, machine.clock.host_s, stream.stream_id)
            done.append(taken)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        for taken in done:
            pool.free(taken)
        raise
    return done


def adopt(buffer: torch.UntypedStorage, taken: Any, index: int) -> torch.UntypedStorage:
    """Make a host storage, accounted as `taken` by `reserve`, into memory of a device."""
    n_bytes = buffer.nbytes()
    storage = storage_over(buffer, 0, n_bytes, sim_device(index))
    stream = current_stream(index)
    key = key_of(storage)
    pool, history = machine.devices[index].pool, History(stream.number)
    _blocks[key] = DeviceBlock(buffer, n_bytes, pool, taken, stream, history, machine.detector)
    weakref.finalize(storage, _release, key).atexit = False
    return storage


def allocate_bytes(n_bytes: int, index: int) -> torch.UntypedStorage:
    """Return a new storage of a device; its bytes are undefined."""
    try:
        buffer = torch.empty(n_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    except RuntimeError:
        if n_bytes < 0:
            raise
        why = " The host has no memory that could stand for it."
        machine.devices[index].pool.refuse(n_bytes, why)
    (taken,) = reserve([n_bytes], index)
    return adopt(buffer, taken, index)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the bytes of a device tensor: the same memory, size and stride."""
    storage = _filled_window_of(tensor).buffer
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        alias = alias.conj()
    return without_negative_bit(alias) if tensor.is_neg() else alias


def on_device(alias: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a device tensor with the geometry of a host tensor, over `storage` of the device."""
    geometry = (alias.size(), alias.stride(), alias.storage_offset())
    return tensor_over(storage, alias.dtype, *geometry)


def span_of(tensor: torch.Tensor) -> Span:
    """Return the bytes of its block that a device tensor touches, from its first to its last."""
    window = _filled_window_of(tensor)
    block = window.block
    if block.detector is not machine.detector:
        # From before the machine was started afresh: the streams in its history are gone.
        block.home_stream, block.detector = current_stream(tensor.device), machine.detector
        block.history = History(block.home_stream.number)
    low = window.low + int(tensor.storage_offset()) * tensor.element_size()
    return Span(block.history, low, low + extent_bytes(tensor))


def _filled_window_of(tensor: torch.Tensor) -> Window:
    window = _window_of(tensor)
    if window.block.is_empty and tensor.numel():
        raise RuntimeError(
            f"{tensor.device}: illegal memory access: the storage of a {list(tensor.shape)} tensor"
            " was resized to 0 bytes."
        )
    return window


def _window_of(tensor: torch.Tensor) -> Window:
    """Return the bytes that a device tensor lies in: a whole block, or what C++ lends of one."""
    key = tensor_key(tensor)
    block = _blocks.get(key)
    if block is not None:
        return Window(block, block.buffer, 0, block.n_bytes)
    found = _windows.get(key)
    return _lent(tensor.untyped_storage()) if found is None else found


def _lent(storage: torch.UntypedStorage) -> Window:
    """Return the window of a storage that C++ made over memory of others, as pickling does."""
    n_bytes = storage.nbytes()
    if n_bytes == 0:
        # It has no address to find a block by.
        return _window_of(torch.empty(0, dtype=torch.uint8, device=storage.device))
    address, key = storage.data_ptr(), key_of(storage)
    for block in list(_blocks.values()):
        low = address - block.buffer.data_ptr()
        if low >= 0 and low + n_bytes <= block.n_bytes:
            buffer = storage_over(block.buffer, low, n_bytes, torch.device("cpu"))
            _windows[key] = Window(block, buffer, low, n_bytes)
            weakref.finalize(storage, _windows.pop, key).atexit = False
            return _windows[key]
    raise RuntimeError(f"{storage.device} has no memory at address {address:#x}.")


def _release(key: int) -> None:
    block = _blocks.pop(key)
    if not block.is_empty:
        _free(block)


def _free(block: DeviceBlock) -> None:
    taken, block.taken = block.taken, None
    if block.detector is not machine.detector:
        # From before the machine was started afresh: no stream of now can still use it.
        block.pool.free(taken)
        return
    _check_release(block)
    recorded = block.history.recorded_stream_ids
    users = [stream for number, stream in machine.streams.items() if number in recorded]
    busy_until_s = max((stream.ready_s for stream in users), default=None)
    block.pool.free(taken, busy_until_s, machine.clock.host_s)


def _check_release(block: DeviceBlock) -> None:
    seen = dict(block.home_stream.seen)
    merge_clocks(seen, machine.host_seen)
    # The allocator gives the block to nobody before an event that it records now on each stream
    # that record_stream() has told it of: what these have waited for is over by then as well.
    for number in block.history.recorded_stream_ids:
        stream = machine.streams.get(number)
        if stream is not None:
            merge_clocks(seen, stream.seen)
    name = f"a block of {format_bytes_as_torch(block.n_bytes)}"
    machine.detector.free(block.history, name, seen)
