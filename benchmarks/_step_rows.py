"""What `step` costs: in micro-batches against a loop by hand, and whole against a plain step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._models import ResNet18, Transformer
from benchmarks._pairs import Pair, time_pair
from benchmarks._record import Row
from tenure.adaptive import step

Batch = tuple[Tensor, Tensor]
LossOf = Callable[[Batch], Tensor]
_SMALL_S = 0.05


def cases() -> dict[str, tuple[nn.Module, Batch, int, int]]:
    """Models, their batches, samples in a micro-batch, and runs for one time."""
    torch.manual_seed(0)
    tokens = torch.randint(1000, (8, 64))
    mlp = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)])
    resnet = ResNet18()
    for module in resnet.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return {
        "transformer, 8 in 4": (Transformer(), (tokens, tokens), 2, 1),
        "ResNet-18 (frozen norms), 8 in 4": (
            resnet,
            (torch.randn(8, 3, 64, 64), torch.randint(10, (8,))),
            2,
            1,
        ),
        "MLP, 512 in 8": (
            mlp,
            (torch.randn(512, 256), torch.randint(256, (512,))),
            64,
            10,
        ),
    }


def split_rows() -> list[Row]:
    """``step`` in k micro-batches against the loop that accumulates by hand."""
    rows = []
    for name, (model, batch, size, runs) in cases().items():
        fn = _loss_of(model)

        def by_hand(n: int, fn: LossOf = fn, batch: Batch = batch, size: int = size) -> None:
            for _ in range(n):
                for x, y in zip(batch[0].split(size), batch[1].split(size), strict=True):
                    (fn((x, y)) * (len(x) / len(batch[0]))).backward()

        def ours(n: int, fn: LossOf = fn, batch: Batch = batch, size: int = size) -> None:
            for _ in range(n):
                step(fn, batch, maximum=size)

        rows.append(
            _row(f"step in micro-batches / by hand: {name}", _timed(model, by_hand, ours, runs))
        )
    return rows


def whole_rows() -> list[Row]:
    """``step`` with a batch that fits, against forward and backward."""
    rows = []
    for name, (model, batch, _, runs) in cases().items():
        fn = _loss_of(model)

        def plain(n: int, fn: LossOf = fn, batch: Batch = batch) -> None:
            for _ in range(n):
                fn(batch).backward()

        def ours(n: int, fn: LossOf = fn, batch: Batch = batch) -> None:
            for _ in range(n):
                step(fn, batch)

        what = f"step that fits / plain step: {name.partition(',')[0]}"
        rows.append(_row(what, _timed(model, plain, ours, runs)))
    return rows


def own_time_row() -> Row:
    """What a step that fits does besides the work, in milliseconds, for 13 modules."""
    model, x = _mlp(8), torch.randn(16, 8)
    fn = _square_of(model)
    n_modules = len(list(model.modules()))
    pair = _timed(model, _plainly(fn, x), _stepwise(fn, x, len(x)), 20)
    own_ms = (pair.ratio - 1) * pair.base_s * 1e3
    note = f"{pair.base_s * 1e3:,.2f} ms plain; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
    what = f"step that fits: its own time, {n_modules} modules"
    return Row(what, f"{own_ms:.2f} ms", "<= 0.5 ms", own_ms <= 0.5, note)


def micro_batch_rows() -> list[Row]:
    """Four micro-batches, long and short, against the loop by hand."""
    rows = []
    for name, width, size, bar, runs in (("6", 384, 96, 1.05, 1), ("0.5", 80, 64, 1.25, 10)):
        model, x = _mlp(width), torch.randn(4 * size, width)
        fn = _square_of(model)
        pair = _timed(model, _by_hand(fn, x, size), _stepwise(fn, x, size), runs)
        note = f"{pair.base_s / 4 * 1e3:,.2f} ms each; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
        what = f"step in 4 micro-batches of {name} ms / by hand"
        rows.append(Row(what, f"{pair.ratio:.3f}", f"<= {bar}", pair.ratio <= bar, note))
    return rows


def graphs_row() -> Row:
    """How often torch.compile compiles a model that a step runs at one size after the other."""
    # imported here: where dynamo is loaded, each chunk is marked for it
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model, x = _mlp(8), torch.randn(66, 8)
    fn = _square_of(torch.compile(model, backend=counter))
    sizes = (66, 64, 33, 32, 20, 13, 7, 5, 3, 2)
    for size in sizes:
        step(fn, x, maximum=size)
    what = f"graphs compiled by a step at {len(sizes)} sizes"
    n_graphs = counter.frame_count
    return Row(what, str(n_graphs), "1", n_graphs == 1, ", ".join(map(str, sizes)))


def step_rows() -> list[Row]:
    """All rows of this page; the last loads dynamo, which the others do without."""
    return [*split_rows(), *whole_rows(), own_time_row(), *micro_batch_rows(), graphs_row()]


def _mlp(width: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers)


def _square_of(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def _plainly(fn: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            fn(x).backward()

    return run


def _by_hand(fn: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            for part in x.split(size):
                (fn(part) * (len(part) / len(x))).backward()

    return run


def _stepwise(fn: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            step(fn, x, maximum=size)

    return run


def _loss_of(model: nn.Module) -> LossOf:
    def loss_of(batch: Batch) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    return loss_of


def _timed(
    model: nn.Module, base: Callable[[int], None], ours: Callable[[int], None], runs: int
) -> Pair:
    """Both begin each time without gradients, as after an optimizer's ``zero_grad``."""

    def fresh(loop: Callable[[int], None]) -> Callable[[int], None]:
        def run(n: int) -> None:
            for _ in range(n):
                model.zero_grad()
                loop(1)

        return run

    rounds = 30 if runs == 1 else 60
    return time_pair(fresh(base), fresh(ours), rounds=rounds, runs=runs, clock=time.process_time)


def _row(what: str, pair: Pair) -> Row:
    """A row; small steps, of which a call costs some percent, only inform."""
    note = f"{pair.base_s * 1e3:,.2f} ms by hand; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
    if pair.base_s < _SMALL_S:
        return Row(what, f"{pair.ratio:.3f}", note=note)
    return Row(what, f"{pair.ratio:.3f}", "<= 1.05", pair.ratio <= 1.05, note)
