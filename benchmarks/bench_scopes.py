"""What a scope costs: against a bare mode, a no_grad block, and training without it."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks._models import ResNet18, Transformer
from benchmarks._pairs import Loop, Pair, time_pair
from benchmarks._record import Row, publish
from tenure import NewDisposeScope
from tenure._torch import swap
from tenure._torch.quiet import without_functions
from tenure.scopes._disposed import DisposedTensor

_MIB = 2**20
_BARS = {"a + b (8 floats)": 1.12, "a.split(2)": 1.25}
_N_SURVIVORS = 500


class BareMode(TorchFunctionMode):
    """The least that a torch-function mode can do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def ops() -> dict[str, Callable[[], object]]:
    """Small operations, where bookkeeping weighs most; `_BARS` says which are judged."""
    a, b, matrix = torch.ones(8), torch.ones(8), torch.ones(128, 128)
    return {
        "a + b (8 floats)": lambda: a + b,
        "torch.add": lambda: torch.add(a, b),
        "a.add_(b)": lambda: a.add_(b),
        "a.view(8)": lambda: a.view(8),
        "a.shape": lambda: a.shape,
        "F.relu(a)": lambda: F.relu(a),
        "torch.stack": lambda: torch.stack([a, b]),
        "a.split(2)": lambda: a.split(2),
        "128x128 matmul": lambda: matrix @ matrix,
    }


def within(context: Callable[[], Any], op: Callable[[], object]) -> Loop:
    """A loop of ``op`` inside one block of ``context``."""

    def loop(runs: int) -> None:
        with context():
            for _ in range(runs):
                op()

    return loop


def blocks(context: Callable[[], Any]) -> Loop:
    """A loop that opens and closes empty blocks of ``context``."""

    def loop(runs: int) -> None:
        for _ in range(runs):
            with context():
                pass

    return loop


def op_rows() -> list[Row]:
    """Tracked operations against the same under a bare mode."""
    pairs = {
        name: time_pair(
            within(BareMode, op),
            within(NewDisposeScope, op),
            rounds=100,
            runs=1000,
            clock=time.process_time,
        )
        for name, op in ops().items()
    }
    return [
        _row(f"tracked op / bare mode: {name}", pair, _BARS.get(name))
        for name, pair in pairs.items()
    ]


def turns_row() -> Row:
    """Functions that take turns at calling torch, as the layers of a model do."""
    a, b = torch.ones(8), torch.ones(8)
    callers: list[Callable[[], Tensor]] = [
        lambda: a + b,
        lambda: a * b,
        lambda: a - b,
        lambda: a / b,
    ]

    def every() -> None:
        for call in callers:
            call()

    pair = time_pair(
        within(BareMode, every),
        within(NewDisposeScope, every),
        rounds=100,
        runs=250,
        clock=time.process_time,
    )
    return _row("tracked op / bare mode: callers that take turns", pair, 1.15)


def nested_scope_row() -> Row:
    """An empty scope in an open one, against an empty ``no_grad`` block outside of any mode."""

    def nested(runs: int) -> None:
        with NewDisposeScope():
            blocks(NewDisposeScope)(runs)

    pair = time_pair(blocks(torch.no_grad), nested, rounds=100, runs=2000, clock=time.process_time)
    return _row("nested scope / no_grad block", pair, 1.2)


def disposal_row() -> Row:
    """The end of a scope for each survivor, against the bare calls that empty a handle."""
    pairs = sorted(
        _seconds_of(let_go) / _seconds_of(bare)
        for bare, let_go in [(_empty_handles, _close_scope)] * 100
    )
    ratio = pairs[len(pairs) // 2]
    note = f"{_N_SURVIVORS} survivors at a time; 10-90 % {pairs[10]:.3f}-{pairs[90]:.3f}"
    what = "a survivor disposed / make_empty + swap"
    return Row(what, f"{ratio:.3f}", "<= 1.6", ratio <= 1.6, note)


def _empty_handles(kept: list[Tensor]) -> Iterator[None]:
    kept += [torch.ones(8) for _ in range(_N_SURVIVORS)]
    yield
    with without_functions():
        for tensor in kept:
            twin = swap.make_empty(DisposedTensor, torch.float32)
            swap.swap(tensor, twin)


def _close_scope(kept: list[Tensor]) -> Iterator[None]:
    with NewDisposeScope():
        kept += [torch.ones(8) for _ in range(_N_SURVIVORS)]
        yield


def _seconds_of(work: Callable[[list[Tensor]], Iterator[None]]) -> float:
    """The time that ``work`` takes after its yield."""
    kept: list[Tensor] = []
    steps = contextmanager(work)(kept)
    steps.__enter__()
    start = time.process_time()
    steps.__exit__(None, None, None)
    return time.process_time() - start


def empty_scope_row() -> Row:
    """An empty scope against an empty ``no_grad`` block."""
    pair = time_pair(
        blocks(torch.no_grad),
        blocks(NewDisposeScope),
        rounds=100,
        runs=2000,
        clock=time.process_time,
    )
    return _row("empty scope / no_grad block", pair, 1.5)


def training_rows() -> list[Row]:
    """Training steps in a scope each, against plain ones."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    tokens = torch.randint(1000, (4, 64))
    cnn = _trainer(ResNet18(), images, labels)
    transformer = _trainer(Transformer(), tokens, tokens)
    return [
        _row("training step in a scope / plain: ResNet-18", _training_pair(cnn), 1.02),
        _row("training step in a scope / plain: transformer", _training_pair(transformer), 1.02),
    ]


def peak_row() -> Row:
    """Peak of the CPU allocator in one training step."""
    step = _trainer(Transformer(), *(2 * [torch.randint(1000, (4, 64))]))
    for _ in range(2):  # the profiler reports only the end of what it saw begin
        allocator_peak(step)
    plain, scoped = allocator_peak(step), allocator_peak(lambda: _in_scope(step))
    ratio = scoped / plain
    note = f"{plain / _MIB:.1f} MiB above the start of the step, by the allocator's own events"
    return Row("memory peak in a scope / plain", f"{ratio:.4f}", "<= 1.00", ratio <= 1.0, note)


def allocator_peak(step: Callable[[], object]) -> int:
    """The peak of allocated bytes while ``step`` runs, above where it started."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    results: Any = profile.profiler
    live = peak = 0
    for event in sorted(_memory_events(results), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def bookkeeping_row() -> Row:
    """Python memory that a million dead temporaries leave in a scope."""
    x = torch.ones(1)
    with NewDisposeScope():
        _ = x + 1
        tracemalloc.start()
        for _ in range(1_000_000):
            torch.add(x, 1)  # made and dropped: that is what is measured
        n_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    mib = n_bytes / _MIB
    return Row("bookkeeping of a million temporaries", f"{mib:.4f} MiB", "<= 1 MiB", mib <= 1)


def compilation_row() -> Row:
    """How often one function is compiled when it is called at depths 0 to 11."""
    torch._dynamo.reset()
    counter = CompileCounter()
    function = torch.compile(lambda x: torch.relu(x) * 2, backend=counter)
    for depth in range(12):
        with ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(NewDisposeScope())
            function(torch.ones(4))
    n_compilations = counter.frame_count
    return Row("compilations at depth 0..11", str(n_compilations), "2", n_compilations == 2)


def compiled_row() -> Row:
    """A compiled model called in a scope, against the same call outside."""
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    compiled, x = torch.compile(model), torch.randn(64, 512)
    pair = time_pair(
        within(nullcontext, lambda: compiled(x)),
        within(NewDisposeScope, lambda: compiled(x)),
        rounds=40,
        runs=20,
        clock=time.process_time,
    )
    return _row("compiled call in a scope / plain: 6 layers of width 512", pair, None)


def _memory_events(profiler: Any) -> list[Any]:
    return [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]


def _trainer(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _in_scope(step: Callable[[], None]) -> None:
    with NewDisposeScope():
        step()


def _training_pair(step: Callable[[], None]) -> Pair:
    def plain(runs: int) -> None:
        for _ in range(runs):
            step()

    def scoped(runs: int) -> None:
        for _ in range(runs):
            _in_scope(step)

    return time_pair(plain, scoped, rounds=40, runs=1, clock=time.process_time)


def _row(what: str, pair: Pair, bar: float | None) -> Row:
    note = f"{pair.base_s * 1e6:,.2f} us plain; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
    if bar is None:
        return Row(what, f"{pair.ratio:.3f}", note=note)
    return Row(what, f"{pair.ratio:.3f}", f"<= {bar}", pair.ratio <= bar, note)


def main() -> None:
    """Measure every row and publish the table."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)  # so that the time of the process is that of the work
    rows = [*op_rows(), turns_row(), empty_scope_row(), nested_scope_row(), disposal_row()]
    rows += [*training_rows(), peak_row(), bookkeeping_row()]
    rows += [compilation_row(), compiled_row()]  # last: dynamo slows what comes after it
    publish("scopes", rows)


if __name__ == "__main__":
    main()
