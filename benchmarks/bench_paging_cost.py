"""How long paging's own Python takes, on a real clock: with layers that take almost no time.

The model computes on the CPU and its weights are in a file, so no device and no link is part of it.
The time of a module is that of a paged pass less that of a plain one, by the number of modules.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks._pairs import Pair, time_pair
from benchmarks._record import Row, publish
from tenure.paging import page

_WIDTH = 16
_N_BLOCKS = 16, 64
_SHARES = {"all resident": (2.0, 60), "half resident": (0.5, 150)}
"""The budget by the weights, and the microseconds that a module may take."""
_MOST_GROWTH = 1.5


class Block(nn.Module):
    """A block of a transformer without its attention: nine modules that have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH) for _ in range(2)])
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(7)])

    def forward(self, x: Tensor) -> Tensor:
        """Two residual branches."""
        q, k, v, out, gate, up, down = self.layers
        h = self.norms[0](x)
        x = x + out(q(h) + k(h) + v(h))
        h = self.norms[1](x)
        return x + down(gate(h) * up(h))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Cost:
    """What paging adds to a pass.

    Attributes:
        pair: the passes, plain and paged.
        block_us: its share of a block.
        module_us: of a module.
    """

    pair: Pair
    block_us: float
    module_us: float


def cost(n_blocks: int, share: float) -> Cost:
    """Paging's own time for a model of so many blocks.

    Args:
        n_blocks: how many.
        share: the budget, by the bytes of the weights.
    """
    torch.manual_seed(0)
    plain, paged = (nn.Sequential(*[Block() for _ in range(n_blocks)]).eval() for _ in range(2))
    x = torch.randn(1, _WIDTH)
    budget = int(share * sum(parameter.nbytes for parameter in paged.parameters()))

    def loop(model: nn.Module, runs: int) -> None:
        for _ in range(runs):
            model(x)

    with (
        torch.inference_mode(),
        tempfile.TemporaryDirectory() as folder,
        page(paged, "cpu", budget=budget, host=Path(folder)),
    ):
        # The clock of the process stands still while others have the processor, and counts the
        # thread that reads the file.
        pair = time_pair(
            lambda runs: loop(plain, runs),
            lambda runs: loop(paged, runs),
            rounds=24,
            runs=3,
            clock=time.process_time,
        )
    own_us = 1e6 * (pair.ours_s - pair.base_s)
    # Those that are called: a ModuleList is not.
    n_modules = sum(not isinstance(each, nn.ModuleList) for each in paged.modules())
    return Cost(pair, own_us / n_blocks, own_us / n_modules)


def rows() -> list[Row]:
    """Every row of the table."""
    made: list[Row] = []
    for what, (share, most_us) in _SHARES.items():
        few, many = (cost(n_blocks, share) for n_blocks in _N_BLOCKS)
        for n_blocks, each in zip(_N_BLOCKS, (few, many), strict=True):
            ours_ms, plain_ms = 1e3 * each.pair.ours_s, 1e3 * each.pair.base_s
            made.append(
                Row(
                    f"a module of {n_blocks} blocks, {what}",
                    f"{each.module_us:.0f} µs",
                    f"<= {most_us} µs",
                    each.module_us <= most_us,
                    f"a pass {ours_ms:.1f} ms, plain {plain_ms:.1f} ms",
                )
            )
        growth = many.block_us / few.block_us
        made.append(
            Row(
                f"a block of 64 / a block of 16, {what}",
                f"{growth:.2f}",
                f"<= {_MOST_GROWTH}",
                growth <= _MOST_GROWTH,
                f"{many.block_us:.0f} µs, {few.block_us:.0f} µs",
            )
        )
    return made


def main() -> None:
    """Measure every row and publish the table."""
    publish("paging_cost", rows(), beside="other programs on the same cores")


if __name__ == "__main__":
    main()
