"""Whose memory a prediction tells, and on which device its tensors without data are.

A device that this machine lacks can still be named: the work runs as on the CPU, and what it makes
is accounted as that device would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._devices import indexed
from tenure._errors import PredictionError

_HOST = ("cpu", "meta")


class Target(NamedTuple):
    """Where work would run.

    Attributes:
        device: whose memory is told.
        runs_on: where the tensors without data are that stand for what is there.
        moves: whether the work's tensors, all on the host, are taken to be there.
        others: other accelerators that have tensors of the work.
    """

    device: torch.device
    runs_on: torch.device
    moves: bool = False
    others: tuple[torch.device, ...] = ()

    @property
    def is_host(self) -> bool:
        """Whether it is the host's memory, of which kernels take some for themselves."""
        return self.device.type == "cpu"

    def place_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor of the work appears."""
        if tensor.device.type == "meta" or (self.moves and tensor.device.type == "cpu"):
            return self.runs_on
        return tensor.device

    def made_on(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of an operation, for a device that is here.

        Raises:
            PredictionError: the device that the work names is neither here nor the one asked for;
                the process would end where autograd meets a tensor of it.
        """
        device = kwargs.get("device")
        if device is None or device.type in _HOST or _is_here(device.type):
            return kwargs
        if device.type != self.device.type:
            raise PredictionError(
                f"The work makes a tensor on {device}, which this machine lacks. Pass "
                f'device="{device.type}" to predict what the work takes there.'
            )
        return {**kwargs, "device": self.runs_on}


def target_of(device: torch.device | str | None, tensors: Iterable[Tensor]) -> Target:
    """Find out where work runs.

    Args:
        device: what the caller named; None for where the work's first tensor is that has data.
        tensors: the parameters and inputs of the work.

    Raises:
        PredictionError: the work's tensors are on accelerators of another kind.
    """
    places = list(dict.fromkeys(each.device for each in tensors if each.device.type != "meta"))
    accelerators = [each for each in places if each.type != "cpu"]
    if device is None:
        return _among(next(iter(places), torch.device("cpu")), accelerators)
    named = torch.device(device)
    if named.type in _HOST:
        return _among(torch.device("cpu"), [])
    if accelerators:
        alike = [each for each in accelerators if each.type == named.type]
        if not alike:
            raise PredictionError(
                f"The work's tensors are on {accelerators[0]}, and device= names {named}. Leave "
                "device= out, or predict with a model on the CPU or on meta."
            )
        return _among(alike[0] if named.index is None else named, accelerators)
    if not _is_here(named.type):
        return Target(named, torch.device("cpu"))
    found = indexed(named)
    return Target(found, found, moves=True)


def _among(device: torch.device, accelerators: list[torch.device]) -> Target:
    return Target(device, device, others=tuple(each for each in accelerators if each != device))


def _is_here(kind: str) -> bool:
    try:
        module: Any = torch.get_device_module(kind)
        return bool(module.is_available())
    # torch knows no such backend, or not how to ask it
    except (RuntimeError, AttributeError):
        return False
