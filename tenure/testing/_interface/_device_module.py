"""`torch.sim`, what `torch.get_device_module("sim")` returns: the interface of `torch.cuda`.

Every function that takes a device accepts `sim`, `sim:0`, 0 or None, the current device, and
refuses an index that does not exist. Statistics bring no context to life; asking the driver does.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from .._allocator._runtime import error_string
from .._device._host_memory import pinned_memory
from .._device._machine import machine
from .._device._streams import Event as Event
from .._device._streams import Stream as Stream
from .._device._streams import current_stream as current_stream
from .._device._streams import default_stream as default_stream
from .._device._streams import set_stream as set_stream
from .._device._streams import stream as stream
from .._device._which import current_index, index_of, made_current, turn_to
from .._torch_backend import sim_device
from ._device_memory import empty_cache as empty_cache
from ._device_memory import fraction_function
from ._device_memory import get_device_name as get_device_name
from ._device_memory import get_device_properties as get_device_properties
from ._device_memory import max_memory_allocated as max_memory_allocated
from ._device_memory import max_memory_reserved as max_memory_reserved
from ._device_memory import mem_get_info as mem_get_info
from ._device_memory import memory_allocated as memory_allocated
from ._device_memory import memory_reserved as memory_reserved
from ._device_memory import memory_snapshot as memory_snapshot
from ._device_memory import memory_stats as memory_stats
from ._device_memory import memory_stats_as_nested_dict as memory_stats_as_nested_dict
from ._device_memory import reset_accumulated_memory_stats as reset_accumulated_memory_stats
from ._device_memory import reset_peak_memory_stats as reset_peak_memory_stats
from ._graphs import CUDAGraph as CUDAGraph
from ._graphs import graph as graph
from ._graphs import is_current_stream_capturing as is_current_stream_capturing

# CUDAGeneratorImpl.cpp of torch 2.13.
_SEEDED = (
    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is"
    " the same as the original seed."
)
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


def current_device() -> int:
    """Return the index of the device that is current in this thread."""
    return current_index()


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
    _seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random numbers of every device; `torch.manual_seed` calls this."""
    for index in range(len(machine.devices)):
        _seed(index, seed)


def _seed(index: int, seed: int) -> None:
    random = machine.devices[index].random
    if current_stream(index).capture is not None and seed != random.initial_seed:
        raise RuntimeError(_SEEDED)
    random.seed(seed)


def get_rng_state(index: Any = None) -> torch.Tensor:
    """Return the state of a device's random numbers, uint8 on the host."""
    return machine.devices[index_of(index)].random.state()


def set_rng_state(state: torch.Tensor, index: Any = None) -> None:
    """Go back to a state from `get_rng_state`."""
    chosen = index_of(index)
    random = machine.devices[chosen].random
    # compared there alone: a mode without data has none to compare
    if current_stream(chosen).capture is not None and not torch.equal(state, random.state()):
        raise RuntimeError(_SEEDED)
    random.set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that `torch.autocast("sim", dtype=...)` takes."""
    return [torch.float16, torch.bfloat16, torch.float32]


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
        machine.forbid_in_capture()
        return pinned_memory.register(address, n_bytes)

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin the range that `cudaHostRegister` pinned from `address`."""
        machine.devices[current_device()].has_context = True
        return pinned_memory.unregister(address)


def cudart() -> _Runtime:
    """Return the functions that pin host memory in place, named as in `torch.cuda.cudart()`."""
    return _Runtime()


def __getattr__(name: str) -> Any:
    found = fraction_function(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
