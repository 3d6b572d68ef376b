"""`torch.sim`, what `torch.get_device_module("sim")` returns: the interface of `torch.cuda`.

Every function that takes a device accepts `sim`, `sim:0`, 0 or None, the current device, and
refuses an index that does not exist. Statistics bring no context to life; asking the driver does.
The fraction of the process exists with the caching allocator only: a program that asks whether the
device has one must be told the truth.
"""

from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from .._allocator import CachingPool, MemoryPool
from .._allocator._runtime import error_string
from .._device._blocks import live_blocks
from .._device._host_memory import pinned_memory
from .._device._machine import machine
from .._device._streams import Event as Event
from .._device._streams import Stream as Stream
from .._device._streams import current_stream as current_stream
from .._device._streams import default_stream as default_stream
from .._device._streams import set_stream as set_stream
from .._device._streams import stream as stream
from .._device._which import current_device as current_device
from .._device._which import index_of, made_current, turn_to
from .._torch_backend import sim_device

# torch.utils.checkpoint saves random states only of modules that say this of themselves.
_initialized = True


def is_available() -> bool:
    """Return True: the device is there once it is set up."""
    return True


def is_initialized() -> bool:
    """Return True."""
    return True


def _is_in_bad_fork() -> bool:
    return machine.is_in_bad_fork


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: the host computes."""
    return True


def _lazy_init() -> None:
    """Do nothing: it is done already."""


def device_count() -> int:
    """Return how many devices the machine was started with."""
    return len(machine.devices)


def set_device(index: Any) -> None:
    """Make a device the current one of this thread."""
    turn_to(index_of(index))


def device(index: Any) -> AbstractContextManager[None]:
    """Context in which a device is the current one."""
    return made_current(index_of(index))


def synchronize(index: Any = None) -> None:
    """Stop the host until all work on the device is done."""
    machine.synchronize(index_of(index))


def ExternalStream(stream_ptr: int, device: Any = None) -> Stream:
    """Return the stream that `memory_snapshot` gives this number: 0 is the default stream.

    Raises:
        RuntimeError: that stream belongs to another device.
    """
    index = index_of(device)
    found: Stream = machine.streams[stream_ptr] if stream_ptr else default_stream(index)
    if found.device_index != index:
        raise RuntimeError(f"invalid resource handle: {found} used on {sim_device(index)}.")
    return found


def manual_seed(seed: int) -> None:
    """Seed the random numbers of the current device."""
    machine.devices[current_device()].random.seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random numbers of every device; `torch.manual_seed` calls this."""
    for each in machine.devices:
        each.random.seed(seed)


def get_rng_state(index: Any = None) -> torch.Tensor:
    """Return the state of a device's random numbers, uint8 on the host."""
    return machine.devices[index_of(index)].random.state()


def set_rng_state(state: torch.Tensor, index: Any = None) -> None:
    """Go back to a state from `get_rng_state`."""
    machine.devices[index_of(index)].random.set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that `torch.autocast("sim", dtype=...)` takes."""
    return [torch.float16, torch.bfloat16, torch.float32]


class DeviceProperties(NamedTuple):
    """As much of the properties of a CUDA device as this one has; its memory is the budget."""

    name: str
    total_memory: int


def get_device_name(index: Any = None) -> str:
    """Return the name of the device."""
    return get_device_properties(index).name


def get_device_properties(index: Any = None) -> DeviceProperties:
    """Return the name and the memory of the device."""
    return DeviceProperties("simulated accelerator", _pool(index).total_bytes)


def memory_allocated(index: Any = None) -> int:
    """Return the bytes of the live tensors."""
    return memory_stats(index)["allocated_bytes.all.current"]


def max_memory_allocated(index: Any = None) -> int:
    """Return the most that was allocated since the peak was last reset."""
    return memory_stats(index)["allocated_bytes.all.peak"]


def memory_reserved(index: Any = None) -> int:
    """Return the bytes that the allocator holds of the device's memory."""
    return memory_stats(index)["reserved_bytes.all.current"]


def max_memory_reserved(index: Any = None) -> int:
    """Return the most that the allocator held since the peak was last reset."""
    return memory_stats(index)["reserved_bytes.all.peak"]


def memory_stats(index: Any = None) -> OrderedDict[str, int]:
    """Statistics with the names of `torch.cuda.memory_stats`."""
    return OrderedDict(sorted(_pool(index).statistics(machine.clock.host_s).items()))


def memory_stats_as_nested_dict(index: Any = None) -> dict[str, Any]:
    """`memory_stats` with a dictionary for each part of a name."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(index).items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def memory_snapshot() -> list[dict[str, Any]]:
    """Return segments like `torch.cuda.memory_snapshot`; in exact mode each block is one."""
    if machine.settings.allocator == "cuda":
        pools = [_caching_pool(index) for index in range(len(machine.devices))]
        return [segment for pool in pools for segment in pool.snapshot()]
    return [
        {
            "device": block.pool.index,
            "address": block.buffer.data_ptr(),
            "total_size": block.n_bytes,
            "stream": block.home_stream.stream_id,
            "segment_pool_id": (0, 0),
        }
        for block in live_blocks()
    ]


def mem_get_info(index: Any = None) -> tuple[int, int]:
    """Free and total bytes; the total is the budget."""
    machine.devices[index_of(index)].has_context = True
    return _pool(index).free_bytes, _pool(index).total_bytes


def reset_peak_memory_stats(index: Any = None) -> None:
    """Start all peaks from the current values."""
    _pool(index).reset_peaks()


def reset_accumulated_memory_stats(index: Any = None) -> None:
    """Start the running totals from zero."""
    _pool(index).reset_totals()


def empty_cache() -> None:
    """Give back what the allocators of all devices hold and do not use."""
    for each in machine.devices:
        each.pool.empty_cache(machine.clock.host_s)


def _set_fraction(fraction: float, index: Any = None) -> None:
    """Bound what may be reserved; looked at where a new segment is taken, and nowhere else."""
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if fraction < 0 or fraction > 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _caching_pool(index).fraction = fraction


def _get_fraction(index: Any = None) -> float:
    """Return the fraction that was set, of the memory that the device has now; 1 before that."""
    return _caching_pool(index).fraction


def _caching_pool(index: Any) -> CachingPool:
    pool = _pool(index)
    if not isinstance(pool, CachingPool):
        raise RuntimeError("the device was started afresh, with an allocator without a fraction.")
    return pool


def _pool(index: Any) -> MemoryPool:
    return machine.devices[index_of(index)].pool


class _Runtime:
    """What `cudart()` returns: pinning in place, by address, with CUDA's error codes.

    As torch's binding: a code other than 0 stays behind as the thread's last error. What pins works
    in the context of the current device, and makes one where there is none.
    """

    def cudaGetErrorString(self, code: int) -> str:
        """Return the meaning of a code."""
        return error_string(int(code))

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        """Pin `n_bytes` from `address`."""
        machine.devices[current_device()].has_context = True
        return pinned_memory.register(address, n_bytes)

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin the range that `cudaHostRegister` pinned from `address`."""
        machine.devices[current_device()].has_context = True
        return pinned_memory.unregister(address)


def cudart() -> _Runtime:
    """Return the functions that pin host memory in place, named as in `torch.cuda.cudart()`."""
    return _Runtime()


def __getattr__(name: str) -> Any:
    if machine.settings.allocator == "cuda":
        if name == "set_per_process_memory_fraction":
            return _set_fraction
        if name == "get_per_process_memory_fraction":
            return _get_fraction
    raise AttributeError(
        f"torch.sim has no {name!r}. What the simulated accelerator has, and what it does not have,"
        " such as graphs, is in docs/simulated-device.md."
    )
