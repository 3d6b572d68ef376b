"""Whether a graph is being captured: then nothing may wait, allocate outside its pool or be freed.

While a stream of CUDA captures, a synchronize, ``empty_cache()``, a read of the random state and
a wait on work from outside each break the capture, and what the graph was told to use must stay
where it is for as long as it is replayed. Rooms ask here before they do any of that.
"""

from __future__ import annotations

from typing import Any

import torch

from ._devices import NO_ACCELERATOR
from ._heap import instances, tracked_objects

_GRAPHS = ("CUDAGraph", "XPUGraph")


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the device's backend is capturing a graph.

    False on devices without graphs, and on an accelerator that is not yet in use: asking brings
    no context to life.

    Source: ``torch.cuda.is_current_stream_capturing``.
    """
    if device.type in NO_ACCELERATOR:
        return False
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return False
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(module.is_initialized()) and bool(ask())


def accelerator_is_capturing() -> bool:
    """Whether the current stream of this machine's accelerator is capturing a graph."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and is_capturing(accelerator)


def kind_of_live_graph(device: torch.device) -> str | None:
    """The class of a captured graph of the device's backend that is alive; None without one.

    Such a graph replays on the addresses that it was captured with. Looks at each object there is.
    """
    module: Any = torch.get_device_module(device)
    classes = [getattr(module, name) for name in _GRAPHS if hasattr(module, name)]
    if classes and instances(tracked_objects(), *classes):
        return str(classes[0].__name__)
    return None
