"""`torch.accelerator` for the simulated device: what torch asks in C++ is answered here instead.

A Python device registers no C++ allocator and no C++ streams, so these private functions behind
`torch.accelerator` fail or crash. `ANSWERS` is the whole list of what is replaced; the page
`docs/simulated-device.md` names what stays unanswered.
"""

import torch

from tenure._torch.python_backend import needed, replace

from .._device._which import turn_back
from . import _device_module as module


def _exchange(index: int) -> int:
    before = module.current_device()
    module.set_device(index)
    return before


def _exchange_back(index: int) -> int:
    before = module.current_device()
    turn_back(index)
    return before


_ANSWERS = {
    "_accelerator_getDeviceIndex": module.current_device,
    "_accelerator_setDeviceIndex": module.set_device,
    "_accelerator_exchangeDevice": _exchange,
    "_accelerator_maybeExchangeDevice": _exchange_back,
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": module.memory_stats_as_nested_dict,
    "_accelerator_getMemoryInfo": module.mem_get_info,
    "_accelerator_emptyCache": module.empty_cache,
    "_accelerator_emptyHostCache": module.empty_cache,
    "_accelerator_resetPeakStats": module.reset_peak_memory_stats,
    "_accelerator_resetAccumulatedStats": module.reset_accumulated_memory_stats,
    "_accelerator_synchronizeDevice": module.synchronize,
    "_accelerator_getStream": module.current_stream,
    "_accelerator_setStream": module.set_stream,
}


# torch 2.11 and older have no empty_host_cache()
if not hasattr(torch.accelerator, "empty_host_cache"):
    del _ANSWERS["_accelerator_emptyHostCache"]
ANSWERS = {f"torch._C.{name}": answer for name, answer in _ANSWERS.items()}
for name in ANSWERS:
    needed(name)


def install() -> None:
    """Put the answers in place."""
    for name, answer in ANSWERS.items():
        replace(name, answer)
