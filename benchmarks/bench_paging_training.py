"""How near to the limit of the link steps of a paged model run, on the simulated device's clock.

A forward can't be over before all weights have been copied to the device, for each step changes
them; a backward pass not before those that did not stay have been copied again, and all gradients
to the host. So the limit of a step is ``max(W/BW, C) + max(W/BW, 2C)``, with ``C`` what a forward
computes. The limit of copies in both directions at any time, ``max((2W-M)/BW, 3C)`` with ``M`` the
budget, is beside it: no step that waits for its gradients reaches it where the link is slower.

With ``activations="host"`` a forward can't be over before what it saves, ``A``, is on the host, nor
a backward pass before that is back beside the weights: ``max(W/BW, A/BW, C)`` and
``max((W/2 + A)/BW, W/BW, 2C)``.

Bytes and speeds are a hundredth of what the rows say, so that every time is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._record import Row, publish
from tenure.paging import page
from tenure.testing import Rates, Simulator, simulated_accelerator

_SMALLER = 100
_PARTS = 6
_STEPS = 4
_BAR = 0.90
_RATIOS = (0.1, 0.3, 0.95, 1.5)


class _Work(torch.autograd.Function):
    """A kernel that takes a given time forward, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: _Part) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = torch.empty_like(x)
        ctx.save_for_backward(weight, made)
        ctx.part = part
        part.sim.launch_kernel(part.compute_s, reads=[weight, x], writes=[made])
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, made = ctx.saved_tensors
        of_weight, of_input = torch.empty_like(weight), torch.empty_like(made)
        ctx.part.sim.launch_kernel(
            2 * ctx.part.compute_s, reads=[weight, made, gradient], writes=[of_weight, of_input]
        )
        return of_input, of_weight, None


class _Part(nn.Module):
    def __init__(self, sim: Simulator, n_bytes: int, compute_s: float) -> None:
        super().__init__()
        self.sim, self.compute_s = sim, compute_s
        self.weight = nn.Parameter(torch.zeros(n_bytes // 4))

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.weight, self)  # type: ignore[no-untyped-call, no-any-return]


def shares(
    sim: Simulator,
    n_blocks: int,
    block_bytes: int,
    ratio: float,
    prefetch: str | int = "auto",
    saved: float = 0.0,
    activations: str | None = None,
) -> tuple[float, float, float]:
    """The shares of the limit pass by pass, and of that in both directions; the peak by the budget.

    Args:
        sim: the simulator.
        n_blocks: how many blocks.
        block_bytes: of each.
        ratio: what its forward computes, by what its copy takes.
        prefetch: as of ``page``.
        saved: what a forward saves for its backward pass, by its weights.
        activations: as of ``page``.
    """
    plain = Rates()
    rates = Rates(
        h2d_bytes_per_s=plain.h2d_bytes_per_s / _SMALLER,
        d2h_bytes_per_s=plain.d2h_bytes_per_s / _SMALLER,
        pageable_bytes_per_s=plain.pageable_bytes_per_s / _SMALLER,
        memory_bytes_per_s=plain.memory_bytes_per_s / _SMALLER,
    )
    sim(rates=rates, detect_races=False)
    part_bytes = block_bytes // _SMALLER // _PARTS // 512 * 512
    compute_s = part_bytes * ratio / rates.h2d_bytes_per_s
    blocks = (
        nn.Sequential(*[_Part(sim, part_bytes, compute_s) for _ in range(_PARTS)])
        for _ in range(n_blocks)
    )
    model = nn.Sequential(*blocks)
    weight_bytes = n_blocks * _PARTS * part_bytes
    budget_bytes = weight_bytes // 2
    x = torch.zeros(max(1, int(part_bytes * saved) // 4), device=sim.device)
    begin_s = 0.0
    unit = f"{_PARTS * part_bytes}B"
    with page(
        model, sim.device, unit, budget=budget_bytes, prefetch=prefetch, training=True,
        activations=activations,
    ):  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(_STEPS):
            begin_s = sim.elapsed_s
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            sim.module.synchronize()
    elapsed_s = sim.elapsed_s - begin_s
    copied_s = weight_bytes / rates.h2d_bytes_per_s
    computed_s = n_blocks * _PARTS * compute_s
    away_s = 0.0 if activations is None else saved * copied_s
    by_pass_s = max(copied_s, away_s, computed_s)
    by_pass_s += max(copied_s, copied_s / 2 + away_s, 2 * computed_s)
    at_any_time_s = max(1.5 * copied_s, 3 * computed_s)
    peak = sim.peak_bytes / budget_bytes
    return by_pass_s / elapsed_s, at_any_time_s / elapsed_s, peak


def rows(sim: Simulator) -> list[Row]:
    """Every row of the table."""
    made = []
    for n_blocks, megabytes in ((24, 32), (12, 64)):
        what = f"{n_blocks} blocks of {megabytes} MB, half of the weights"
        for prefetch, bar in (("auto", _BAR), (0, 0.0)):
            found = [shares(sim, n_blocks, megabytes * 10**6, r, prefetch) for r in _RATIOS]
            least = min(by_pass for by_pass, _, _ in found)
            told = ", ".join(
                f"{ratio}: {by_pass:.3f} ({at_any_time:.3f})"
                for ratio, (by_pass, at_any_time, _) in zip(_RATIOS, found, strict=True)
            )
            peak = max(peak for _, _, peak in found)
            how = "" if prefetch == "auto" else "; nothing fetched ahead"
            note = f"computation / copy {told}; peak / budget {peak:.2f}"
            bar_text = f">= {bar}" if bar else ""
            made.append(
                Row(f"share of a step's limit: {what}{how}", f"{least:.3f}", bar_text,
                    least >= bar, note)
            )  # fmt: skip
    return [*made, _with_activations(sim)]


def _with_activations(sim: Simulator) -> Row:
    """Activations as large as half of the weights, on the host."""
    n_blocks, megabytes, saved = 24, 32, 0.5
    block_bytes = megabytes * 10**6
    found = [
        shares(sim, n_blocks, block_bytes, ratio, saved=saved, activations="host")
        for ratio in _RATIOS
    ]
    _, _, kept_peak = shares(sim, n_blocks, block_bytes, _RATIOS[0], saved=saved)
    told = ", ".join(f"{r}: {share:.3f}" for r, (share, *_) in zip(_RATIOS, found, strict=True))
    peak = max(peak for *_, peak in found)
    least = min(share for share, *_ in found)
    what = f"{n_blocks} blocks of {megabytes} MB, half of the weights, activations on the host"
    note = f"computation / copy {told}; peak / budget {peak:.2f}, {kept_peak:.2f} without"
    return Row(
        f"share of a step's limit: {what}", f"{least:.3f}", f">= {_BAR}", least >= _BAR, note
    )


def main() -> None:
    """Measure every row and publish the table."""
    with simulated_accelerator() as sim:
        publish("paging_training", rows(sim))


if __name__ == "__main__":
    main()
