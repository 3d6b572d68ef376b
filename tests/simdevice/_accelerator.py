"""`torch.accelerator` for the simulated device: what torch asks in C++ is answered here instead.

A Python device registers no C++ allocator and no C++ streams, so these private functions behind
`torch.accelerator` fail or crash. `ANSWERS` is the whole list of what is replaced; the page
`docs/simulated-device.md` names what stays unanswered.
"""

from typing import Any

import torch

from . import _device_module as module


def _statistics(index: int) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in module.memory_stats(index).items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


ANSWERS = {
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": _statistics,
    "_accelerator_getMemoryInfo": module.mem_get_info,
    "_accelerator_emptyCache": module.empty_cache,
    "_accelerator_emptyHostCache": module.empty_cache,
    "_accelerator_resetPeakStats": module.reset_peak_memory_stats,
    "_accelerator_resetAccumulatedStats": module.reset_accumulated_memory_stats,
    "_accelerator_synchronizeDevice": module.synchronize,
    "_accelerator_getStream": module.current_stream,
    "_accelerator_setStream": module.set_stream,
}


def install() -> None:
    """Put the answers in place; a name that torch no longer has is an error."""
    for name, answer in ANSWERS.items():
        getattr(torch._C, name)
        setattr(torch._C, name, answer)
