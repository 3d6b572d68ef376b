"""A block in which tensors are made without data, whatever device a program names.

Invariant: nothing is made on a device. One that is not here is taken to be the CPU, as what is on
the CPU is taken to be on the device that a prediction is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tenure import _devices
from tenure._torch.fakes import building, is_fake, new_mode, no_fakes

_ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "mtia")
_ROWS = (torch.linspace, torch.tensor, torch.arange)


@contextmanager
def without_data(*, keeps_names: bool = False, has_rows: bool = False) -> Iterator[None]:
    """Return a block in which tensors have no data, and devices that are not here are the host.

    Args:
        keeps_names: whether a ``torch.device`` keeps its name; see `Elsewhere`.
        has_rows: whether rows of numbers on the host have data.
    """
    elsewhere = _devices.Elsewhere(_is_missing, torch.device("cpu"), keeps_names=keeps_names)
    with ExitStack() as stack:
        stack.enter_context(building(new_mode()))
        stack.enter_context(elsewhere)
        if has_rows:
            stack.enter_context(_RowsOfTheHost())
        yield


def _is_missing(kind: str) -> bool:
    # tensors of meta don't mix with those of a batch
    return kind == "meta" or (kind in _ACCELERATORS and not _devices.is_here(kind))


class _RowsOfTheHost(TorchFunctionMode):
    """A block in which rows of numbers have data: models and meshes read them as they are made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # the host of an accelerator that is not here has nothing to pin for
        if func is Tensor.pin_memory and is_fake(args[0]):
            return args[0]
        is_row = func in _ROWS and "cpu" in str(kwargs.get("device"))
        is_of_rows = args and isinstance(args[0], Tensor) and not is_fake(args[0])
        with no_fakes() if is_row or is_of_rows else nullcontext():
            return func(*args, **kwargs)
