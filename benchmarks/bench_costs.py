"""What single things cost that no other table has: the source of numbers that pages quote.

Each is the difference of a pair that was timed alternately, in time of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks._models import Transformer
from benchmarks._pairs import Loop, time_pair
from benchmarks._record import Row, publish
from tenure import NewDisposeScope, adaptive
from tenure.testing import simulated_accelerator

_A = torch.ones(8)


def main() -> None:
    """Time each, and publish the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [*_budget(), _recording(), *_ends(), *_simulated()]
    publish("costs", rows, beside="other programs on both cores; times are the process's own")


def _add(runs: int) -> None:
    for _ in range(runs):
        torch.add(_A, _A)


def _budget() -> Iterator[Row]:
    def limited(runs: int) -> None:
        with adaptive.memory_budget("1GiB"):
            _add(runs)

    yield _row("an operation in a memory_budget", _add, limited, rounds=31, runs=2000)
    model, tokens = Transformer(), torch.randint(1000, (4, 64))

    def steps(runs: int) -> None:
        for _ in range(runs):
            model.zero_grad()
            model(tokens).square().mean().backward()

    def limited_steps(runs: int) -> None:
        with adaptive.memory_budget("8GiB"):
            steps(runs)

    what = "a training step in a memory_budget: transformer of 4 layers of 512"
    yield _row(what, steps, limited_steps, rounds=7, runs=1)


def _recording() -> Row:
    """A step of three layers and a loss: seven calls of torch."""
    layers = [nn.Linear(16, 16) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    x, y = torch.randn(4, 16), torch.randn(4, 16)

    def step(values: Callable[[], tuple[Tensor, Tensor]]) -> Loop:
        def loop(runs: int) -> None:
            for _ in range(runs):
                inputs, targets = values()
                nn.functional.mse_loss(model(inputs), targets).backward()

        return loop

    lazily = step(lambda: adaptive.lazy(x, y))
    return _row("a lazy step of three layers", step(lambda: (x, y)), lazily, rounds=31, runs=20)


def _ends() -> Iterator[Row]:
    """The end of a block: for each survivor, and for each module that the process has."""

    def block(survivors: int) -> Loop:
        def loop(runs: int) -> None:
            for _ in range(runs):
                kept = []
                with NewDisposeScope():
                    kept += [torch.add(_A, _A) for _ in range(1000)]
                    del kept[survivors:]

        return loop

    yield _row("a survivor let go", block(1), block(1000), rounds=21, runs=1, per=999)
    few = _end_s()
    modules = [nn.Identity() for _ in range(20_000)]
    many = _end_s()
    yield Row(
        "the end of a block with a survivor, each module",
        f"{(many - few) / len(modules) * 1e6:.2f} us",
        note=f"{len(modules):,} modules more",
    )


def _end_s() -> float:
    """The least time that the end of a block takes where one tensor survives."""
    times = []
    for _ in range(21):
        with NewDisposeScope() as scope:
            kept = torch.add(_A, _A)
            started = time.process_time()
            scope.close()
        times.append(time.process_time() - started)
        del kept
    return min(times)


def _simulated() -> Iterator[Row]:
    with simulated_accelerator() as sim:
        there = torch.ones(8, device=sim.device)

        def add(runs: int) -> None:
            for _ in range(runs):
                torch.add(there, there)

        def view(on: Tensor) -> Loop:
            def loop(runs: int) -> None:
                for _ in range(runs):
                    on.view(8)

            return loop

        what = "on the simulated accelerator"
        yield _row(f"an operation {what}", _add, add, rounds=21, runs=200)
        yield _row(f"a view {what}", view(_A), view(there), rounds=21, runs=500)


def _row(what: str, base: Loop, other: Loop, *, rounds: int, runs: int, per: int = 1) -> Row:
    """How much longer the other takes; shared by so many things."""
    pair = time_pair(base, other, rounds=rounds, runs=runs, clock=time.process_time)
    more = (pair.ours_s - pair.base_s) / per * 1e6
    text = f"{more:.2f} us" if more < 1000 else f"{more / 1e3:.2f} ms"
    spread = f"10-90 % {pair.low:.2f}-{pair.high:.2f}"
    note = f"{pair.ratio:.2f} times {pair.base_s * 1e6:,.1f} us; {spread}"
    return Row(what, f"+{text}", note=note)


if __name__ == "__main__":
    main()
