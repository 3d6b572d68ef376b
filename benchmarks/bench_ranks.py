"""What ranks say to each other in a step: counted in groups of thousands, timed in real ones.

Counts are those of the code that runs: in a process group of torch's own that sends nothing, whose
sums are multiplied by the number of ranks, as if all had said the same. Times are those of gloo
between processes of this machine, which have its cores to share.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks._record import Row, publish
from tenure.adaptive import memory_budget, reset, step
from tenure.adaptive import statistics as attempts_so_far
from tenure.adaptive._ranks import Ballot, RankGroup, _group, rank_group
from tenure.adaptive._ranks._vote import tally

_WORLDS = (8, 64, 512, 4096)
_REAL = (2, 4, 8)
_WIDTH, _N_LAYERS, _N_SAMPLES = 64, 4, 48


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
              for _ in range(_N_LAYERS))  # fmt: skip
    return nn.Sequential(*layers)


# --- counted


@contextmanager
def _as_if_all_said_the_same(world: int) -> Iterator[None]:
    plain: Callable[..., Any] = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **how: Any) -> None:
        plain(tensor, op=op, **how)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(world)

    def combine(votes: Any, tensor: torch.Tensor, of_two: Any, patience: Any) -> None:
        for _ in range(world.bit_length() - 1):
            tensor.copy_(of_two(tensor, tensor))

    def as_if_all_were_there(group: RankGroup, entry: str) -> None:
        group._votes = object()

    with (
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(RankGroup, "connect", as_if_all_were_there),
        patch.object(_group, "combine", combine),
    ):
        yield


def _counted(world: int) -> dict[str, int]:
    """Collectives and bytes of one step, and how often it was begun."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    sent: dict[str, list[int]] = {"vote": [], "sum": [], "copy_from": []}

    def counted(name: str) -> Any:
        plain = getattr(RankGroup, name)

        def method(self: RankGroup, *args: Any) -> None:
            sent[name] += [each.nbytes for each in args if isinstance(each, torch.Tensor)]
            plain(self, *args)

        return patch.object(RankGroup, name, method)

    try:
        module, x = _model(), torch.randn(_N_SAMPLES, 16, _WIDTH)
        with memory_budget("1GiB") as whole:
            module(x).square().mean().backward()
        module.zero_grad()
        model = DistributedDataParallel(module)
        begun = attempts_so_far().attempts
        limit = int(whole.peak_bytes * 0.4)
        reset()
        with ExitStack() as stack:
            stack.enter_context(_as_if_all_said_the_same(world))
            for name in sent:
                stack.enter_context(counted(name))
            stack.enter_context(memory_budget(limit))
            result = step(lambda b: model(b).square().mean(), x, verify=False)
        assert result.n_samples == world * _N_SAMPLES
        return {
            "attempts": attempts_so_far().attempts - begun,
            "votes": len(sent["vote"]),
            "vote_bytes": sum(sent["vote"]),
            "collectives": len(sent["sum"]) + len(sent["copy_from"]),
            "bytes": sum(sent["sum"]) + sum(sent["copy_from"]),
            "parameters": sum(p.nbytes for p in model.parameters()),
        }
    finally:
        dist.destroy_process_group()


def counted_rows() -> Iterator[Row]:
    """What one step says in groups of each size."""
    for world in _WORLDS:
        found = _counted(world)
        yield Row(
            f"world {world}: votes / attempts of a step that runs out of memory",
            f"{found['votes']} / {found['attempts']}",
            "1",
            reached=found["votes"] == 1 < found["attempts"],
            note=f"{found['vote_bytes']} bytes",
        )
        yield Row(
            f"world {world}: collectives for gradients",
            str(found["collectives"]),
            note=f"{found['bytes']} bytes, of {found['parameters']} bytes of parameters",
        )


# --- timed


def _timed(rank: int, world: int, folder: str) -> dict[str, float]:
    """Medians in seconds; votes and bare collectives take turns."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    group = rank_group("step", dist.group.WORLD)
    assert group is not None
    ours, bare, word = [], [], torch.zeros(1, dtype=torch.float64)
    for i in range(220):
        start = time.perf_counter()
        tally(group, Ballot(mark=1))
        middle = time.perf_counter()
        dist.all_reduce(word)
        if i >= 20:
            ours.append(middle - start)
            bare.append(time.perf_counter() - middle)
    model, x = DistributedDataParallel(_model()), torch.randn(_N_SAMPLES, 16, _WIDTH)
    stepped, plain = [], []
    for i in range(30):
        model.zero_grad()
        start = time.perf_counter()
        step(lambda b: model(b).square().mean(), x)
        middle = time.perf_counter()
        model.zero_grad()
        again = time.perf_counter()
        model(x).square().mean().backward()
        if i >= 5:
            stepped.append(middle - start)
            plain.append(time.perf_counter() - again)
    median = statistics.median
    return {
        "vote": median(ours), "bare": median(bare), "step": median(stepped), "plain": median(plain)
    }  # fmt: skip


def _on_ranks(world: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    found = _timed(rank, world, folder)
                    Path(folder, f"{rank}.json").write_text(json.dumps(found))
                    dist.barrier()
                    code = 0
                finally:
                    # a group of gloo that is destroyed right after a collective may wait for ever
                    os._exit(code)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert not any(codes), codes
        result: dict[str, float] = json.loads(Path(folder, "0.json").read_text())
        return result


def timed_rows() -> Iterator[Row]:
    """What a vote and a step take between processes of this machine."""
    for world in _REAL:
        found = _on_ranks(world)
        yield Row(
            f"{world} processes: a vote / an all_reduce of one number by gloo",
            f"{found['vote'] / found['bare']:.2f}",
            note=f"{found['vote'] * 1e6:.0f} us",
        )
        yield Row(
            f"{world} processes: step() that fits / backward() of DistributedDataParallel",
            f"{found['step'] / found['plain']:.2f}",
            note=f"{found['plain'] * 1e3:.1f} ms",
        )


if __name__ == "__main__":
    publish("ranks", [*timed_rows(), *counted_rows()])
