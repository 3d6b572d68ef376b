"""Blocks whose kernels take a given virtual time, and the time of passes over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tenure.testing import Simulator

_PARTS = 6
_PASSES = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """Blocks in a row, and a budget.

    Attributes:
        what: in words.
        block_bytes: the size of each block.
        budget_bytes: what weights may take of the device.
        bar: the share of the limit to reach.
        ratios: computation by copy time, of each block.
    """

    what: str
    block_bytes: list[int]
    budget_bytes: int
    bar: float
    ratios: tuple[float, ...]


class Part(nn.Module):
    """A layer whose kernel takes a given virtual time."""

    def __init__(self, sim: Simulator, n_bytes: int, compute_s: float) -> None:
        super().__init__()
        self._sim = sim
        self.weight = nn.Parameter(torch.zeros(n_bytes, dtype=torch.uint8), requires_grad=False)
        self.compute_s = compute_s

    def forward(self, x: Tensor) -> Tensor:
        self._sim.launch_kernel(self.compute_s, reads=[self.weight])
        return x

    @classmethod
    def block(cls, sim: Simulator, n_bytes: int, compute_s: float) -> nn.Sequential:
        """A block of several such layers."""
        parts = [cls(sim, n_bytes // _PARTS, compute_s / _PARTS) for _ in range(_PARTS)]
        return nn.Sequential(*parts)


def pass_s(sim: Simulator, model: nn.Module) -> float:
    """The time of a pass, in a row of them."""
    x = torch.zeros(0, device=sim.device)
    for _ in range(3):
        model(x)
    stream = sim.module.current_stream()
    begin_s = stream.ready_s  # without a stop: passes follow each other, as tokens do
    for _ in range(_PASSES):
        model(x)
    return float(stream.ready_s - begin_s) / _PASSES
