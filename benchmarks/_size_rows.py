"""How near the size that a retry settles on comes to the largest that fits, and at what price."""

from __future__ import annotations

import importlib
import logging
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks._record import Row
from tenure import adaptive

_N_SITES = 40
_FEWEST, _MOST = 32, 4096
_SAMPLE = 1024
"""Bytes that a sample needs, where memory is real."""
Work = Callable[[int], None]


@dataclass(slots=True)
class Site:
    """A place in a program whose work fits up to a size.

    Attributes:
        largest: the largest size that fits.
        initial: the size that the program asks for.
        last: the last size that worked.
        n_ooms: how often the work ran out of memory.
    """

    largest: int
    initial: int
    last: int = 0
    n_ooms: int = 0

    def work(self, size: int) -> None:
        """Run out of memory as CUDA does, in words that every peer knows."""
        if size > self.largest:
            self.n_ooms += 1
            raise RuntimeError("CUDA out of memory.")
        self.last = size

    def real_work(self, size: int) -> None:
        """Allocate, within a budget."""
        try:
            torch.empty(size * _SAMPLE, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            self.n_ooms += 1
            raise
        self.last = size

    @property
    def share(self) -> float:
        """The size found, of the largest that fits."""
        return self.last / self.largest


def sites() -> list[Site]:
    """The same sites each time: up to four times more is asked for than fits."""
    draw = random.Random(0)
    largest = [round(2 ** draw.uniform(5, 12)) for _ in range(_N_SITES)]
    return [Site(size, round(size * draw.uniform(1, 4))) for size in largest]


def size_rows() -> list[Row]:
    """Sizes found by each, where errors tell nothing; then ours where memory is measured."""
    logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)
    rows = [_judged("errors that tell nothing, 500 calls", ours_blind)]
    rows += [_judged("a memory_budget, 20 calls", ours_measured)]
    rows += [
        _judged(f"a memory_budget, the first call: {name}", run, first)
        for name, run, first in (
            ("batch, one run", first_batch, 0.5),
            ("range", first_range, 0.95),
            ("batch that predicts", first_predicted, 0.95),
            ("step", first_step, 0.95),
            ("find_batch_size", found_before, 0.95),
        )
    ]
    rows += [network_row(name) for name in networks()]
    for name, peer in peers().items():
        value, note = _told([peer(site) for site in sites()])
        rows.append(Row(f"size found / largest: {name}", value, note=note))
    return rows


def ours_blind(site: Site) -> Site:
    """Call a decorated function again and again."""
    batch = adaptive.batch(initial_batchsize=site.initial)(site.work)
    for _ in range(500):
        batch()
    return site


def ours_measured(site: Site) -> Site:
    """The same, in a budget that the site's largest size just fits."""
    batch = adaptive.batch(initial_batchsize=site.initial)(site.real_work)
    with adaptive.memory_budget(site.largest * _SAMPLE):
        for _ in range(20):
            batch()
    return site


def first_batch(site: Site) -> Site:
    """Call a decorated function once."""
    with adaptive.memory_budget(site.largest * _SAMPLE):
        adaptive.batch(initial_batchsize=site.initial)(site.real_work)()
    return site


def first_predicted(site: Site) -> Site:
    """Call a decorated function once, which asks a prediction when it has failed."""
    with adaptive.memory_budget(site.largest * _SAMPLE):
        adaptive.batch(initial_batchsize=site.initial, predict=True)(site.real_work)()
    return site


def found_before(site: Site) -> Site:
    """Look for the largest size before the work, up to a thousand times what fits."""
    site.last = adaptive.find_batch_size(
        site.real_work,
        high=1000 * site.largest,
        budget=site.largest * _SAMPLE,
        margin=0,
    )
    return site


def first_range(site: Site) -> Site:
    """Walk once over ten times what fits; what counts is the last size before the rest."""
    sizes: list[int] = []

    def work(start: int, end: int) -> None:
        site.real_work(end - start)
        sizes.append(end - start)

    with adaptive.memory_budget(site.largest * _SAMPLE):
        adaptive.range(initial_step=site.initial)(work)(0, 10 * site.largest)
    site.last = sizes[-2]
    return site


def first_step(site: Site) -> Site:
    """One step over the batch that the program asks for, whose samples need all the memory."""
    weight = torch.zeros((), requires_grad=True)
    batch = torch.zeros(site.initial, 1)

    def loss(samples: torch.Tensor) -> torch.Tensor:
        site.real_work(len(samples))
        return (samples * weight).mean()

    room = 16 * site.largest + 64  # for what the loss makes of such small samples
    with adaptive.memory_budget(site.largest * _SAMPLE + room):
        result = adaptive.step(loss, batch, cache_type=adaptive.NoBatchsizeCache)
    site.last = min(result.micro_batch, site.largest)
    return site


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Small networks with a batch each; of one most of the memory is fixed."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh())
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()
    )
    encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return {
        "MLP": (deep, torch.randn(500, 64)),
        "MLP, mostly weights": (wide, torch.randn(2000, 64)),
        "CNN": (convolutions, torch.randn(128, 3, 16, 16)),
        "transformer": (encoder, torch.randn(100, 20, 32)),
    }


def network_row(name: str) -> Row:
    """Twenty steps under a third of the memory that the whole batch takes."""
    net, x = networks()[name]

    def loss(samples: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = net(samples)
        return output.square().mean()

    with adaptive.memory_budget(1 << 40) as whole:
        loss(x).backward()
    net.zero_grad()
    budget = whole.peak_bytes // 3
    adaptive.reset()
    told: list[adaptive.AdaptiveEvent] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    sizes = []
    with adaptive.memory_budget(budget):
        for _ in range(20):
            sizes.append(adaptive.step(loss, x, on_retry=told.append).micro_batch)
            optimizer.step()
            optimizer.zero_grad()
    n_ooms = sum(event.kind == "shrink" for event in told)
    share = sizes[0] / _largest_micro_batch(loss, x, budget, net)
    return Row(
        f"first micro-batch / largest, OOMs in 20 steps at a third of the memory: {name}",
        f"{share:.2f}, {n_ooms}",
        ">= 0.95, <= 3",
        share >= 0.95 and n_ooms <= 3,
        f"micro-batches of {sizes[0]}, then {sizes[-1]}, of {len(x)}",
    )


def _largest_micro_batch(
    loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, budget: int, net: nn.Module
) -> int:
    low, high = 1, len(x)
    while low < high:
        middle = (low + high + 1) // 2
        net.zero_grad()
        try:
            with adaptive.memory_budget(budget):
                adaptive.step(
                    loss, x, minimum=middle, maximum=middle, verify=False,
                    cache_type=adaptive.NoBatchsizeCache,
                )  # fmt: skip
            low = middle
        except adaptive.OutOfRetriesError:
            high = middle - 1
    net.zero_grad()
    return low


def peers() -> dict[str, Callable[[Site], Site]]:
    """Those that can be imported here."""
    found: dict[str, Callable[[Site], Site]] = {}
    for name, run in (("toma", _toma), ("accelerate", _accelerate)):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        found[f"{name}, 3 calls"] = partial(run, module)
    return found


def _toma(toma: Any, site: Site) -> Site:
    cache = toma.batchsize_cache.GlobalBatchsizeCache
    batch = toma.toma.batch(initial_batchsize=site.initial, cache_type=cache)(site.work)
    for _ in range(3):
        batch()
    return site


def _accelerate(accelerate: Any, site: Site) -> Site:
    find = accelerate.utils.find_executable_batch_size

    def work(batch_size: int) -> None:
        site.work(batch_size)

    batch = find(work, starting_batch_size=site.initial)
    for _ in range(3):
        batch()
    return site


def _judged(what: str, run: Callable[[Site], Site], bar: float = 0.95) -> Row:
    found = [run(site) for site in sites()]
    value, note = _told(found)
    reached = min(s.share for s in found) >= bar and max(s.n_ooms for s in found) <= 3
    return Row(
        f"size found / largest: tenure, {what}", value, f">= {bar}, <= 3 OOMs", reached, note
    )


def _told(found: list[Site]) -> tuple[str, str]:
    shares, n_ooms = [site.share for site in found], [site.n_ooms for site in found]
    value = f"{statistics.median(shares):.2f} (least {min(shares):.2f})"
    return value, f"{statistics.mean(n_ooms):.1f} OOMs on average, {max(n_ooms)} at the most"
