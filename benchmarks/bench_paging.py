"""How near to the limit of the link paging runs, on the simulated device's virtual clock.

The limit of a pass is ``max((W-R)/BW, C)``: what has to be copied by the speed of the link, or what
has to be computed. Every time here is virtual, so the same numbers come out on every machine.
"""

from __future__ import annotations

import os
from itertools import cycle, islice

import psutil
from torch import nn

from benchmarks._paging_blocks import Part, Workload, pass_s
from benchmarks._paging_peers import peer_rows
from benchmarks._record import Row, publish
from tenure.paging import PagedModel, page
from tenure.testing import Simulator, simulated_accelerator

_MB = 10**6


def workloads() -> list[Workload]:
    """The four of the table; a budget is given in mean blocks."""
    uneven = list(islice(cycle([56 * _MB, 8 * _MB]), 12))
    return [
        Workload("24 blocks of 32 MB", [32 * _MB] * 24, 71 * _MB, 0.97, (0.1, 0.5, 0.95, 1.5)),
        Workload("12 blocks of 8 MB", [8 * _MB] * 12, 26 * _MB, 0.94, (0.3, 0.95)),
        Workload("12 blocks of 56 and 8 MB", uneven, 137 * _MB, 0.92, (0.3, 0.95)),
        Workload(
            "24 blocks of 32 MB, half of them stay", [32 * _MB] * 24, 456 * _MB, 0.95,
            (0.1, 0.5, 0.95, 1.5),
        ),
    ]  # fmt: skip


def blocks(sim: Simulator, workload: Workload, ratio: float) -> nn.Sequential:
    """The model of a workload."""
    byte_s = ratio / sim.rates.h2d_bytes_per_s
    made = (Part.block(sim, n_bytes, n_bytes * byte_s) for n_bytes in workload.block_bytes)
    return nn.Sequential(*made).eval()


def share(sim: Simulator, workload: Workload, ratio: float, unit: str) -> tuple[float, float]:
    """The share of the limit, and by what the peak exceeds the budget, as a ratio to it."""
    sim(detect_races=False)
    model = blocks(sim, workload, ratio)
    size: int | str = f"{max(workload.block_bytes)}B" if unit == "block" else -1
    with page(model, sim.device, size, budget=workload.budget_bytes) as handle:
        elapsed_s = pass_s(sim, model)
        limit_s = max(
            _passing_bytes(handle) / sim.rates.h2d_bytes_per_s,
            sum(part.compute_s for part in model.modules() if isinstance(part, Part)),
        )
    return float(limit_s / elapsed_s), float(sim.peak_bytes / workload.budget_bytes)


def _passing_bytes(handle: PagedModel) -> int:
    return sum(unit.n_bytes for unit in handle.plan.units if not unit.resident)


def host_ratio(sim: Simulator) -> float:
    """Host memory of a paged model, by its weights."""
    sim(detect_races=False)
    process = psutil.Process(os.getpid())
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)]).eval()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    before_bytes = process.memory_info().rss
    with page(model, sim.device, budget="64MiB"):
        grown_bytes = process.memory_info().rss - before_bytes - sim.allocated_bytes
    return float(1 + max(0, grown_bytes) / weight_bytes)


def main() -> None:
    """Measure every row and publish the table."""
    with simulated_accelerator() as sim:
        publish("paging", rows(sim))


def rows(sim: Simulator) -> list[Row]:
    """Every row of the table."""
    ratio = host_ratio(sim)  # first: what is freed later stays with the C library
    made: list[Row] = []
    peaks: list[float] = []
    for workload in workloads():
        for unit in ("block", "auto"):
            found = [share(sim, workload, ratio, unit) for ratio in workload.ratios]
            shares = ", ".join(
                f"{ratio}: {each:.3f}"
                for ratio, (each, _) in zip(workload.ratios, found, strict=True)
            )
            least = min(each for each, _ in found)
            peaks += [peak for _, peak in found]
            units = "a unit a block" if unit == "block" else "units of the planner's choice"
            bar = f">= {workload.bar}" if unit == "block" else ""
            reached = least >= workload.bar
            made.append(
                Row(f"share of the limit: {workload.what}; {units}", f"{least:.3f}", bar, reached,
                    f"computation / copy {shares}")
            )  # fmt: skip
    made += peer_rows(sim, workloads()[:3])  # where all weights pass, as they do there
    made.append(Row("peak / budget", f"{max(peaks):.4f}", "<= 1", max(peaks) <= 1))
    made.append(Row("host memory / weights", f"{ratio:.3f}", "<= 1.05", ratio <= 1.05))
    return made


if __name__ == "__main__":
    main()
