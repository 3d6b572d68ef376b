"""Models that take turns within one budget, and a cache that grows beside weights that give way.

Against the best of all fixed ways to divide the same bytes, each of which is tried. All times are
virtual: blocks of 0.75 MiB over a link that is slower as they are smaller than blocks of 32 MB.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks._paging_blocks import Part
from benchmarks._record import Row, publish
from tenure.paging import PagingBudget, page
from tenure.testing import Rates, Simulator, simulated_accelerator

_BLOCK_BYTES = 3 * 2**18
_LINK = Rates(h2d_bytes_per_s=24e9 * _BLOCK_BYTES / 32e6)
_PARTS = 12
"""The budget is divided in so many, of which one model has 1, 2, ... and the other the rest."""
_WARM, _ROUNDS = 5, 3
_TURNS = ((1, 1), (2, 2), (1, 4), (6, 6))
_RATIOS = ((0.1, 0.1), (0.5, 0.5), (0.95, 0.95), (0.1, 0.8))
_N_BLOCKS = (24, 16)
_N_PASSES = 48


def blocks(sim: Simulator, n_blocks: int, ratio: float) -> nn.Sequential:
    """A model whose blocks compute for this share of the time that they are copied in."""
    compute_s = ratio * _BLOCK_BYTES / sim.rates.h2d_bytes_per_s
    return nn.Sequential(*[Part(sim, _BLOCK_BYTES, compute_s) for _ in range(n_blocks)]).eval()


def round_s(
    sim: Simulator, ratios: tuple[float, float], turns: tuple[int, int],
    budgets: list[int] | list[PagingBudget],
) -> float:  # fmt: skip
    """The time of a round of turns, in a row of them."""
    sim(detect_races=False, rates=_LINK)
    models = [blocks(sim, n, ratio) for n, ratio in zip(_N_BLOCKS, ratios, strict=True)]
    size = f"{_BLOCK_BYTES}B"
    handles = [page(model, sim.device, size, budget=budgets[i]) for i, model in enumerate(models)]
    x, stream = torch.zeros(0, device=sim.device), sim.module.current_stream()
    begin_s = 0.0
    for number in range(_WARM + _ROUNDS):
        if number == _WARM:
            begin_s = stream.ready_s
        for model, n_passes in zip(models, turns, strict=True):
            for _ in range(n_passes):
                model(x)
    took_s = float(stream.ready_s - begin_s) / _ROUNDS
    for handle in handles:
        handle.unpage()
    return took_s


def turn_rows(sim: Simulator) -> list[Row]:
    """For each kind of turns, the best fixed division by the shared budget."""
    limit = sum(_N_BLOCKS) * _BLOCK_BYTES // 2
    made = []
    for turns in _TURNS:
        found = []
        for ratios in _RATIOS:
            shared = PagingBudget(limit)
            shared_s = round_s(sim, ratios, turns, [shared, shared])
            peak = sim.peak_bytes / limit
            parts = [limit * n // _PARTS for n in range(1, _PARTS)]
            fixed = [round_s(sim, ratios, turns, [part, limit - part]) for part in parts]
            found.append((ratios, min(fixed) / shared_s, peak))
        least = min(ratio for _, ratio, _ in found)
        told = ", ".join(f"{a} and {b}: {ratio:.3f}" for (a, b), ratio, _ in found)
        most = max(peak for *_, peak in found)
        what = f"best fixed division / shared budget: turns of {turns[0]} and {turns[1]} passes"
        note = f"computation / copy {told}; peak / limit {most:.3f}"
        made.append(Row(what, f"{least:.3f}", ">= 0.95", least >= 0.95 and most <= 1, note))
    return made


class Cached(nn.Module):
    """A model that keeps some bytes of the device for each pass."""

    def __init__(self, sim: Simulator, ratio: float, grown_bytes: int) -> None:
        super().__init__()
        self.blocks = blocks(sim, _N_BLOCKS[0], ratio)
        self.cache: list[torch.Tensor] = []
        self._grown_bytes = grown_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A pass, with its own part of the cache."""
        self.cache.append(torch.empty(self._grown_bytes, dtype=torch.uint8, device=x.device))
        return self.blocks(x)  # type: ignore[no-any-return]


def growing_s(sim: Simulator, ratio: float, budget: int | str) -> float | None:
    """The time of all passes; None where they run out of memory."""
    weight_bytes = _N_BLOCKS[0] * _BLOCK_BYTES
    sim(detect_races=False, rates=_LINK, budget=weight_bytes * 5 // 4)
    model = Cached(sim, ratio, weight_bytes * 3 // 4 // _N_PASSES).eval()
    stream = sim.module.current_stream()
    handle = page(model, sim.device, f"{_BLOCK_BYTES}B", budget=budget)
    begin_s = stream.ready_s
    try:
        x = torch.zeros(0, device=sim.device)
        for _ in range(_N_PASSES):
            model(x)
        return float(stream.ready_s - begin_s)
    except torch.OutOfMemoryError:
        return None
    finally:
        handle.unpage()


def cache_row(sim: Simulator) -> Row:
    """The best fixed budget by the one that follows what is free."""
    found, first_oom = [], 0.0
    weight_bytes = _N_BLOCKS[0] * _BLOCK_BYTES
    for ratio in (0.1, 0.5, 0.95):
        auto_s = growing_s(sim, ratio, "auto")
        assert auto_s is not None
        fixed: list[float] = []
        for n in range(2, _N_BLOCKS[0] + 1):
            took_s = growing_s(sim, ratio, n * _BLOCK_BYTES)
            if took_s is None:
                first_oom = n * _BLOCK_BYTES / weight_bytes
                break
            fixed.append(took_s)
        found.append((ratio, min(fixed) / auto_s))
    least = min(each for _, each in found)
    told = ", ".join(f"{ratio}: {each:.3f}" for ratio, each in found)
    note = f"computation / copy {told}; from {first_oom:.2f} of the weights on a fixed one runs out"
    what = 'best fixed budget / budget="auto": a cache grows to 3/4 of the weights'
    return Row(what, f"{least:.3f}", ">= 0.95", least >= 0.95, note)


def main() -> None:
    """Measure every row and publish the table."""
    with simulated_accelerator() as sim, torch.no_grad():
        publish("paging_shared", [*turn_rows(sim), cache_row(sim)])


if __name__ == "__main__":
    main()
