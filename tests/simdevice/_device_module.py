"""`torch.sim`, what `torch.get_device_module("sim")` returns: the interface of `torch.cuda`.

Every function that takes a device accepts `sim`, `sim:0`, 0 or None and refuses another index.
"""

from collections import OrderedDict
from types import TracebackType
from typing import Any

import torch

from ._blocks import live_blocks
from ._dispatch import require_first_device, require_own_device
from ._machine import machine
from ._pinned import pinned_memory
from ._streams import Event as Event
from ._streams import Stream as Stream
from ._streams import current_stream as current_stream
from ._streams import default_stream as default_stream
from ._streams import set_stream as set_stream
from ._streams import stream as stream
from ._torch_backend import DEVICE_TYPE

# What mem_get_info reports as the total where the test set no budget.
UNBOUNDED_BYTES = 1 << 40

# torch.utils.checkpoint saves random states only of modules that say this of themselves.
_initialized = True

_EVENT_COUNTS = ("num_sync_all_streams", "num_device_alloc", "num_device_free")


def is_available() -> bool:
    """Always True: the device is there once it is set up."""
    return True


def is_initialized() -> bool:
    """Always True."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Nothing is left to do."""


def device_count() -> int:
    """One device."""
    return 1


def current_device() -> int:
    """The index of the only device."""
    return 0


def set_device(index: Any) -> None:
    """Check that the device exists."""
    _check(index)


def get_device_name(index: Any = None) -> str:
    """What the device calls itself."""
    _check(index)
    return "simulated accelerator"


class device:
    """Context in which a device is the current one."""

    def __init__(self, index: Any) -> None:
        _check(index)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


def synchronize(index: Any = None) -> None:
    """Stop the host until all work on the device is done."""
    _check(index)
    machine.synchronize()


def memory_allocated(index: Any = None) -> int:
    """Bytes of the live tensors."""
    return int(memory_stats(index)["allocated_bytes.all.current"])


def max_memory_allocated(index: Any = None) -> int:
    """The most that was allocated since the peak was last reset."""
    return int(memory_stats(index)["allocated_bytes.all.peak"])


def memory_reserved(index: Any = None) -> int:
    """Active bytes: the simulated device keeps no cache."""
    return int(memory_stats(index)["reserved_bytes.all.current"])


def max_memory_reserved(index: Any = None) -> int:
    """The most bytes that were active since the peak was last reset."""
    return int(memory_stats(index)["reserved_bytes.all.peak"])


def memory_stats(index: Any = None) -> OrderedDict[str, int]:
    """Statistics with the names of `torch.cuda.memory_stats`; pools are not told apart."""
    _check(index)
    pool = machine.pool
    pool.release_finished(machine.clock.host_s)
    stats: OrderedDict[str, int] = OrderedDict()
    for name, counter in (*pool.counters.items(), *_reserved()):
        for figure in ("current", "peak", "allocated", "freed"):
            stats[f"{name}.all.{figure}"] = getattr(counter, figure)
    stats["num_ooms"] = pool.oom_count
    stats["num_alloc_retries"] = pool.retry_count
    counts = (pool.retry_count, pool.counters["active"].allocated, pool.counters["active"].freed)
    return stats | dict(zip(_EVENT_COUNTS, counts, strict=True))


def _reserved() -> list[tuple[str, Any]]:
    counters = machine.pool.counters
    return [("reserved_bytes", counters["active_bytes"]), ("segment", counters["active"])]


def memory_snapshot() -> list[dict[str, Any]]:
    """Live memory as `torch.cuda.memory_snapshot` tells of it: each block is a segment."""
    return [
        {
            "device": 0,
            "address": block.buffer.data_ptr(),
            "total_size": block.n_bytes,
            "stream": block.home_stream.stream_id,
            "segment_pool_id": (0, 0),
        }
        for block in live_blocks()
    ]


def ExternalStream(stream_ptr: int, device: Any = None) -> Stream:
    """The stream with a number as from `memory_snapshot`."""
    _check(device)
    return machine.streams[stream_ptr]


def mem_get_info(index: Any = None) -> tuple[int, int]:
    """Free and total bytes; the total is the budget."""
    _check(index)
    total = machine.pool.budget_bytes
    total_bytes = UNBOUNDED_BYTES if total is None else total
    return max(0, total_bytes - machine.pool.active_bytes), total_bytes


def reset_peak_memory_stats(index: Any = None) -> None:
    """Start all peaks from the current values."""
    _check(index)
    machine.pool.reset_peaks()


def reset_accumulated_memory_stats(index: Any = None) -> None:
    """Start the running totals from zero."""
    _check(index)
    machine.pool.reset_totals()


def empty_cache() -> None:
    """Nothing is cached; only blocks whose recorded streams are done are let go."""
    machine.pool.release_finished(machine.clock.host_s)


def manual_seed(seed: int) -> None:
    """Seed the device's random numbers."""
    machine.random.seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the device's random numbers; `torch.manual_seed` calls this."""
    machine.random.seed(seed)


def get_rng_state(index: Any = None) -> torch.Tensor:
    """The state of the device's random numbers, uint8 on the host."""
    _check(index)
    return machine.random.state()


def set_rng_state(state: torch.Tensor, index: Any = None) -> None:
    """Go back to a state from `get_rng_state`."""
    _check(index)
    machine.random.set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that `torch.autocast("sim", dtype=...)` takes."""
    return [torch.float16, torch.bfloat16, torch.float32]


class _Runtime:
    """What `cudart()` returns: pinning in place, by address, with CUDA's error codes."""

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        """Pin `n_bytes` from `address`."""
        return pinned_memory.register(address, n_bytes)

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin the range that `cudaHostRegister` pinned from `address`."""
        return pinned_memory.unregister(address)


def cudart() -> _Runtime:
    """The runtime functions that pin host memory in place, named as in `torch.cuda.cudart()`."""
    return _Runtime()


def _check(index: Any) -> None:
    if isinstance(index, int):
        require_first_device(torch.device(DEVICE_TYPE, max(index, 0)))
    elif index is not None:
        require_own_device(torch.device(index))
