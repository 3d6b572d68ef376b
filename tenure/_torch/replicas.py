"""What torch keeps to itself of replicas, and of the groups of processes that they talk in."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from . import refuse
from .patches import Patch

_PURPOSE = "step() with a DistributedDataParallel"
_RESET = "_C._distributed_c10d.Reducer._reset_state"
_C10D = "torch.distributed.distributed_c10d"
_ASKS = "_rank_not_in_group"
"""What every collective asks first, and what only reads a group asks as well."""


def reset_reducer(module: nn.parallel.DistributedDataParallel) -> None:
    """Let a module run forward whose last backward pass was broken off, and begin anew."""
    reset = getattr(module.reducer, "_reset_state", None)
    if reset is None:
        refuse(f"torch.{_RESET}", _PURPOSE)
    # both, as where torch changes the group of a module: buckets are built by the order of a whole
    # backward pass
    module._has_rebuilt_buckets = False
    reset()


def timeout_of(group: Any) -> timedelta:
    """Return how long the collectives of a process group wait for a rank."""
    options: list[Any] = [
        getattr(group._get_backend(each), "options", None) for each in group._device_types
    ]
    named = [each._timeout for each in options if hasattr(each, "_timeout")]
    distributed: Any = torch.distributed
    default: timedelta = distributed.constants.default_pg_timeout
    return max(named, default=default)


class _CollectivesOfThread(threading.local):
    told: Callable[[str], object] | None = None


_this_thread = _CollectivesOfThread()


@contextmanager
def told_of_collectives(told: Callable[[str], object] | None) -> Iterator[None]:
    """Return a block that is told of collectives of ``torch.distributed`` before they begin.

    Of those that this thread begins by Python, for a group with other ranks; compiled code and
    functional collectives begin theirs elsewhere.

    Args:
        told: gets the name of the collective; None: nobody is told, whoever wanted to be.
    """
    with _asking.block():
        before, _this_thread.told = _this_thread.told, told
        try:
            yield
        finally:
            _this_thread.told = before


def _telling(asks: Any) -> Any:
    @functools.wraps(asks)
    def tells(group: Any) -> Any:
        is_outside = asks(group)
        if _this_thread.told is not None and not is_outside:
            name = sys._getframe(1).f_code.co_name
            # what reads a group or sets it up waits for nobody
            if not name.startswith(("get_", "_")) and torch.distributed.get_world_size(group) > 1:
                _this_thread.told(name)
        return is_outside

    return tells


# without that name nobody is told, which takes an error that names a mistake, and nothing else
_asking = Patch(_C10D, {_ASKS: _telling})


def active_replica() -> nn.parallel.DistributedDataParallel | None:
    """Return the module whose forward pass this code runs in, or None."""
    # without that name a mistake is not noticed, and nothing else is lost
    found: nn.parallel.DistributedDataParallel | None = getattr(
        nn.parallel.DistributedDataParallel, "_active_ddp_module", None
    )
    return found


def rebuild_buckets(module: nn.parallel.DistributedDataParallel) -> None:
    """Let a module put its buckets into the order of its last exchange, if it waits to do so.

    All ranks talk to each other then, and would do so in the next forward pass.
    """
    if module.reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True


class _AsItStands:
    """A reducer that does not put its buckets into another order now, and may do so later."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def buckets_kept(module: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """Return a block in which `rebuild_buckets` waits: a forward pass in it asks no other rank."""
    reducer = module.reducer
    module.reducer = _AsItStands(reducer)  # type: ignore[assignment]
    try:
        yield
    finally:
        module.reducer = reducer


def specialities_of(module: nn.parallel.DistributedDataParallel) -> list[str]:
    """Return the options of a module besides averaging gradients after a backward pass."""
    found = {
        "a comm hook": bool(module._comm_hooks)
        or bool(module._get_ddp_logging_data().get("comm_hook"))
        or hasattr(module, "buffer_hook"),
        "static_graph=True": module.static_graph,
        "mixed_precision=": module.mixed_precision is not None,
        "delay_all_reduce_named_params=": bool(module._delay_all_reduce_params),
        "a block of torch's Join": module._join_config.enable,
    }
    return [name for name, is_there in found.items() if is_there]


def exchanged_buffers(module: nn.parallel.DistributedDataParallel) -> list[torch.Tensor]:
    """Return the buffers that a module brings to all ranks."""
    # buffers may have been replaced
    module._assign_modules_buffers()
    return list(module.modules_buffers)
