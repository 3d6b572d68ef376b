"""What looking costs and finds: graphs, reports and holders, against the plainest way to look."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._pairs import Loop, Pair, time_pair
from benchmarks._record import Row, publish
from tenure.profiler import MemReporter, holders, saved_for_backward, snapshot

_CASES = Path(__file__).parent.parent / "tests" / "profiler" / "owners" / "saved_cases.py"


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

    def pair(base: Callable[[], object], ours: Callable[[], object], runs: int) -> Pair:
        clock = time.process_time
        return time_pair(_repeat(base), _repeat(ours), rounds=15, runs=runs, clock=clock)

    report = partial(quiet_report, model)
    nodes = f"{plain_walk(loss)} nodes"
    walk = pair(lambda: plain_walk(loss), lambda: saved_for_backward(loss), 20)
    return [
        _row("saved_for_backward / a walk over the nodes", walk, nodes),
        _row(
            "report / a scan for tensors",
            pair(visible_bytes, report, 1),
            n_objects,
        ),
        _row("snapshot / a scan for tensors", pair(visible_bytes, snapshot, 1), n_objects),
        _row(
            "holders / gc.get_referrers",
            pair(lambda: gc.get_referrers(x), lambda: holders(x), 5),
            n_objects,
        ),
    ]


class Node:
    """An object with an attribute."""

    def __init__(self, held: object) -> None:
        self.held = held


def big_heap(n_objects: int) -> list[Node]:
    """Objects as programs have them: instances, dictionaries, lists and tuples, some nested."""
    return [
        Node({"id": str(i), "tags": [i, str(i)], "pair": ([i], Node(i))})
        for i in range(n_objects // 6)
    ]


def plain_scan() -> list[Any]:
    """The plainest look at a heap: every object that the collector shows, and its type."""
    return [found for found in gc.get_objects() if isinstance(found, Tensor)]


def deep(n_levels: int) -> tuple[Node, weakref.ref[Tensor]]:
    """A tensor so many objects away from a variable."""
    t = torch.ones(3)
    root = Node(t)
    for _ in range(n_levels - 1):
        root = Node([root])
    return root, weakref.ref(t)


def heap_rows(n_objects: int = 1_000_000) -> list[Row]:
    """Each way to look in a large heap, against a scan of it for tensors."""
    heap, model, x = big_heap(n_objects), transformer(), torch.randn(8, 64, 128)
    loss = model(x).sum()
    shallow, (root, far) = [torch.ones(3)], deep(4)
    near = weakref.ref(shallow[0])
    gc.collect()
    looks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("holders of an item of a list", lambda: holders(_alive(near))),
        ("holders of what is seven objects deep", lambda: holders(_alive(far))),
        ("snapshot", snapshot),
        ("report", partial(quiet_report, model)),
    )
    rows = [_heap_row(what, look) for what, look in looks]
    assert heap, (loss, root)
    return rows


def _alive(ref: weakref.ref[Tensor]) -> Tensor:
    found = ref()
    assert found is not None
    return found


def _heap_row(what: str, look: Callable[[], object]) -> Row:
    clock = time.process_time
    pair = time_pair(_repeat(plain_scan), _repeat(look), rounds=5, runs=1, clock=clock)
    n_objects = f"{len(gc.get_objects()):,} objects"
    note = f"{pair.ratio:.2f} times a scan for tensors ({pair.base_s * 1e3:,.0f} ms); {n_objects}"
    return Row(f"{what}, large heap", f"{pair.ours_s:.2f} s", "0.3 s", pair.ours_s <= 0.3, note)


def quiet_report(model: nn.Module) -> None:
    """A report that nobody reads."""
    with redirect_stdout(io.StringIO()):
        MemReporter(model).report()


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
    publish("reports", [*found_rows(), *cost_rows(), *heap_rows()])
