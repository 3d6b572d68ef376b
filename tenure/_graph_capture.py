"""Whether a graph is being captured: then nothing may wait, allocate outside its pool or be freed.

While a stream of CUDA captures, a synchronize, ``empty_cache()``, a read of the random state and
a wait on work from outside each break the capture, and what the graph was told to use must stay
where it is for as long as it is replayed. Rooms ask here before they do any of that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ._devices import NO_ACCELERATOR
from ._heap import instances, tracked_objects
from ._torch.patches import Patch

_GRAPHS = ("CUDAGraph", "XPUGraph")
_under_way: weakref.WeakSet[object] = weakref.WeakSet()
"""The graphs that are being captured, on whatever thread, as far as they are watched."""
_watches: dict[type, Patch] = {}


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of the device's backend is capturing a graph.

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


def captures_somewhere(device: torch.device) -> bool:
    """Return whether any thread captures a graph of the backend; see ``watch_captures()``.

    torch tells it of the current stream alone, and what waits for the whole device breaks the
    capture of any thread.
    """
    return is_capturing(device) or (device.type not in NO_ACCELERATOR and bool(_under_way))


def watch_captures(device: torch.device, owner: object) -> Callable[[], object]:
    """Watch the captures of all threads as long as an object lives; return what ends that."""
    known = [] if device.type in NO_ACCELERATOR else _classes(torch.get_device_module(device))
    ends = [_watches.setdefault(kind, _watch(kind)).last_while(owner) for kind in known]
    return lambda: [end() for end in ends]


def _watch(kind: Any) -> Patch:
    """Return the patch that notes which graphs of a class are being captured."""
    begin, end = (functools.partial(_noting, is_end=is_end) for is_end in (False, True))
    return Patch(kind, {"capture_begin": begin, "capture_end": end})


def _noting(verb: Callable[..., Any], *, is_end: bool) -> Callable[..., Any]:
    @functools.wraps(verb)
    def noting(graph: object, *args: Any, **options: Any) -> Any:
        # From before the begin to after the end. A capture that could not begin is none.
        has_begun = is_end
        _under_way.add(graph)
        try:
            result = verb(graph, *args, **options)
            has_begun = True
            return result
        finally:
            if is_end or not has_begun:
                _under_way.discard(graph)

    return noting


def _classes(module: Any) -> list[type]:
    return [getattr(module, name) for name in _GRAPHS if hasattr(module, name)]


def accelerator_is_capturing() -> bool:
    """Return whether the current stream of this machine's accelerator is capturing a graph."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and is_capturing(accelerator)


def kind_of_live_graph(device: torch.device) -> str | None:
    """Return the class of a captured graph of the device's backend that is alive; None without one.

    Such a graph replays on the addresses that it was captured with. Looks at each object there is.
    """
    module: Any = torch.get_device_module(device)
    classes = _classes(module)
    if classes and instances(tracked_objects(), *classes):
        return str(classes[0].__name__)
    return None
