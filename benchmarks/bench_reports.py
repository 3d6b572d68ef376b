"""What looking costs and finds: graphs, reports and holders, against the plainest way to look."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._pairs import Loop, Pair, time_pair
from benchmarks._record import Row, publish
from tenure.profiler import MemReporter, holders, saved_for_backward, snapshot

_CASES = Path(__file__).parent.parent / "tests" / "profiler" / "saved_cases.py"


def found_rows() -> list[Row]:
    """Bytes that autograd keeps, as found and as the allocator has them, in a fresh process."""
    command = [sys.executable, "-W", "ignore", str(_CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cases = {name: case for name, case in json.loads(done.stdout).items() if case["truth"]}
    exact = sum(case["found"] == case["truth"] for case in cases.values())
    found, truth = (sum(case[key] for case in cases.values()) for key in ("found", "truth"))
    return [
        Row(
            "bytes held by autograd found",
            f"{100 * found / truth:.1f} %",
            "100 %",
            exact == len(cases),
            f"{exact} of {len(cases)} graphs to the byte",
        ),
        Row("of a transformer's, with a handle in Python", f"{100 * visible_share():.0f} %"),
    ]


def transformer() -> nn.Module:
    """Three layers of width 128."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def visible_share() -> float:
    """How much of what autograd keeps a search for tensor objects finds."""
    model, x = transformer(), torch.randn(8, 64, 128)
    gc.collect()
    before = visible_bytes()
    loss = model(x).sum()
    seen = visible_bytes() - before - loss.nbytes
    share: float = seen / saved_for_backward(loss).total_bytes
    return share


def visible_bytes() -> int:
    """The plainest look: every tensor that the collector shows, each storage once."""
    storages = [o.untyped_storage() for o in gc.get_objects() if isinstance(o, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def plain_walk(root: Tensor) -> int:
    """Every node of a graph, and nothing of what it saved."""
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(inner for inner, _ in node.next_functions)
    return len(seen)


def cost_rows() -> list[Row]:
    """Each way to look against the plainest one, on the processor's clock."""
    model, x = transformer(), torch.randn(8, 64, 128)
    loss = model(x).sum()
    n_objects = f"{len(gc.get_objects()):,} objects"

    def quiet_report() -> None:
        with redirect_stdout(io.StringIO()):
            MemReporter(model).report()

    def pair(base: Callable[[], object], ours: Callable[[], object], runs: int) -> Pair:
        clock = time.process_time
        return time_pair(_repeat(base), _repeat(ours), rounds=15, runs=runs, clock=clock)

    nodes = f"{plain_walk(loss)} nodes"
    walk = pair(lambda: plain_walk(loss), lambda: saved_for_backward(loss), 20)
    return [
        _row("saved_for_backward / a walk over the nodes", walk, nodes),
        _row("report / a scan for tensors", pair(visible_bytes, quiet_report, 1), n_objects),
        _row("snapshot / a scan for tensors", pair(visible_bytes, snapshot, 1), n_objects),
        _row(
            "holders / gc.get_referrers",
            pair(lambda: gc.get_referrers(x), lambda: holders(x), 5),
            n_objects,
        ),
    ]


def _repeat(look: Callable[[], object]) -> Loop:
    def loop(runs: int) -> None:
        for _ in range(runs):
            look()

    return loop


def _row(what: str, pair: Pair, size: str) -> Row:
    times = f"{pair.base_s * 1e3:,.2f} ms and {pair.ours_s * 1e3:,.2f} ms"
    spread = f"10-90 % {pair.low:.2f}-{pair.high:.2f}"
    return Row(what, f"{pair.ratio:.2f}", note=f"{times}, {size}; {spread}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    publish("reports", [*found_rows(), *cost_rows()])
