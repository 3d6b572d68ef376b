"""What `torch.sim` tells of memory and may change of it: the functions of `torch.cuda.memory`.

The fraction of the process exists with the caching allocator only, as `FRACTION_FUNCTIONS`: a
program that asks whether the device has one must be told the truth.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from .._allocator import CachingPool, MemoryPool
from .._device._blocks import live_blocks
from .._device._machine import machine
from .._device._which import index_of

# CUDACachingAllocator.cpp of torch 2.13, in whose words the cache is not emptied in a capture.
_EMPTIED = (
    '!is_capture_context() INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":4291,'
    " please report a bug to PyTorch. "
)


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """As much of the properties of a CUDA device as this one has."""

    name: str
    total_memory: int


def get_device_name(index: Any = None) -> str:
    """Return the name of the device."""
    return get_device_properties(index).name


def get_device_properties(index: Any = None) -> DeviceProperties:
    """Return the name and the memory of the device, which is the budget."""
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
    pools = [device.pool for device in machine.devices]
    caching = [pool for pool in pools if isinstance(pool, CachingPool)]
    if caching:
        return [segment for pool in caching for segment in pool.snapshot()]
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
    if machine.capture is not None:
        raise RuntimeError(_EMPTIED)
    for device in machine.devices:
        device.pool.empty_cache(machine.clock.host_s)


def set_per_process_memory_fraction(fraction: float, index: Any = None) -> None:
    """Bound what may be reserved; looked at where a new segment is taken, and nowhere else."""
    pool = _caching_pool(index)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if fraction < 0 or fraction > 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    pool.fraction = fraction


def get_per_process_memory_fraction(index: Any = None) -> float:
    """Return the fraction that was set, of the memory that the device has now; 1 before that."""
    return _caching_pool(index).fraction


FRACTION_FUNCTIONS = {
    run.__name__: run for run in (set_per_process_memory_fraction, get_per_process_memory_fraction)
}


def fraction_function(name: str) -> Any:
    """Return one of `FRACTION_FUNCTIONS` if the caching allocator is in use; else None."""
    return FRACTION_FUNCTIONS.get(name) if isinstance(_pool(0), CachingPool) else None


def _caching_pool(index: Any) -> CachingPool:
    pool = _pool(index)
    if not isinstance(pool, CachingPool):
        raise RuntimeError("the device was started afresh, with an allocator without a fraction.")
    return pool


def _pool(index: Any) -> MemoryPool:
    return machine.devices[index_of(index)].pool
