"""Whose memory a prediction tells, and on which device its tensors without data are.

A device that this machine lacks can still be named: the work runs as on the CPU, and what it makes
is accounted as that device would.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tenure._devices import NO_ACCELERATOR, Elsewhere, indexed, is_here
from tenure._errors import PredictionError


class Target(NamedTuple):
    """Where work would run.

    Attributes:
        device: whose memory is told.
        runs_on: where the tensors without data are that stand for what is there.
        moves: whether the work's tensors, all on the host, are taken to be there.
    """

    device: torch.device
    runs_on: torch.device
    moves: bool = False

    @property
    def is_host(self) -> bool:
        """Whether it is the host's memory, of which kernels take some for themselves."""
        return self.device.type == "cpu"

    @property
    def stands_for(self) -> str | None:
        """The kind of device that is not here, for which the CPU stands; None if it does not."""
        return None if self.device.type == self.runs_on.type else self.device.type

    def place_of(self, tensor: Tensor) -> torch.device:
        """Return the device on which a tensor of the work appears."""
        if tensor.device.type == "meta" or (self.moves and tensor.device.type == "cpu"):
            return self.runs_on
        return tensor.device

    def made_on(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of an operation, for a device that is here.

        Raises:
            PredictionError: the device that the work names is neither here nor the one asked for;
                the process would end where autograd meets a tensor of it.
        """
        device = kwargs.get("device")
        if device is None or device.type in NO_ACCELERATOR or is_here(device.type):
            return kwargs
        if device.type != self.device.type:
            raise PredictionError(
                f"The work makes a tensor on {device}, which this machine lacks. Pass "
                f'device="{device.type}" to predict what the work takes there.'
            )
        return {**kwargs, "device": self.runs_on}

    def shown(self) -> AbstractContextManager[Any]:
        """Open a block in which moves to a device that is not here change nothing."""
        if self.stands_for is None:
            return nullcontext()
        return Elsewhere(self.stands_for.__eq__, self.runs_on, keeps_names=True)


def target_of(device: torch.device | str | None, tensors: Iterable[Tensor]) -> Target:
    """Find out where work runs.

    Args:
        device: what the caller named; None for where the work's first tensor is that has data.
            The others are not counted: work on several devices is predicted for each in turn.
        tensors: the parameters and inputs of the work.

    Raises:
        PredictionError: the work's tensors are on accelerators of another kind.
    """
    places = list(dict.fromkeys(each.device for each in tensors if each.device.type != "meta"))
    accelerators = [each for each in places if each.type != "cpu"]
    if device is None:
        device = next(iter(places), torch.device("cpu"))
        return Target(device, device)
    named = torch.device(device)
    if named.type in NO_ACCELERATOR:
        return Target(torch.device("cpu"), torch.device("cpu"))
    if accelerators:
        alike = [each for each in accelerators if each.type == named.type]
        if not alike:
            raise PredictionError(
                f"The work's tensors are on {accelerators[0]}, and device= names {named}. Leave "
                "device= out, or predict with a model on the CPU or on meta."
            )
        found = alike[0] if named.index is None else named
        return Target(found, found)
    if not is_here(named.type):
        return Target(named, torch.device("cpu"))
    found = indexed(named)
    return Target(found, found, moves=True)
