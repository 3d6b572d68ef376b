"""What a compiled step compiles, how long its first call takes, and what its compiler keeps.

The accelerator is the simulated one, whose operations run on the CPU: seconds are those of Python,
of dynamo and of autograd's part of the compiler. Inductor makes no code for it and runs on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks._record import Row, publish
from tenure import adaptive
from tenure._torch import allocations
from tenure.adaptive import predict_peak, statistics, step
from tenure.testing import Simulator, simulated_accelerator

_SIZES = (66, 64, 33, 32, 20, 13, 7, 5, 3, 2)
_Batch = dict[str, Tensor]


class Transformer(nn.Module):
    """Layers over token ids, and the mean of their outputs."""

    def __init__(self, width: int, n_layers: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
            for _ in range(n_layers)
        )
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of each sequence."""
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


def _loss_of(model: Callable[[Tensor], Tensor], criterion: Any = F.cross_entropy) -> Any:
    return lambda batch: criterion(model(batch["x"]), batch["y"])


def _tokens(n: int, length: int = 32, device: torch.device | str = "cpu") -> _Batch:
    x, y = torch.randint(100, (n, length)), torch.randint(10, (n,))
    return {"x": x.to(device), "y": y.to(device)}


# --- graphs


def _with_blocks(model: Transformer, counter: Any) -> Any:
    # in place torch compiles nothing of a class of its own
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend=counter)  # type: ignore[assignment]
    return _loss_of(model)


_FORMS: dict[str, Callable[[Transformer, Any], Any]] = {
    "a model": lambda model, c: _loss_of(torch.compile(model, backend=c)),
    "a function, fullgraph": lambda model, c: torch.compile(_loss_of(model), backend=c),
    "each block": _with_blocks,
    "a loss": lambda model, c: _loss_of(model, torch.compile(F.cross_entropy, backend=c)),
}


def graph_rows() -> Iterator[Row]:
    """How many graphs a step compiles that is run at one size after the other."""
    for name, form in _FORMS.items():
        for passes in ("", " in two passes"):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("aot_eager")
            model, batch = Transformer(8, 2), _tokens(66, 4)
            fn = form(model, counter)
            called = _with_two_terms(fn) if passes else fn
            for size in _SIZES:
                step(called, batch, maximum=size)
            n_graphs = counter.frame_count
            what = f"graphs of {name} compiled at {len(_SIZES)} sizes{passes}"
            yield Row(what, str(n_graphs), "1", n_graphs == 1)


def _with_two_terms(fn: Any) -> Any:
    return lambda batch: {"a": (fn(batch) * len(batch["y"]), len(batch["y"])), "b": fn(batch)}


# --- the first call


def first_call_rows(sim: Simulator) -> Iterator[Row]:
    """Seconds of the first step under a third of the memory, with a prediction and without."""
    for name in ("a model", "each block"):
        for predict in (False, True):
            torch._dynamo.reset()
            adaptive.reset()
            sim(budget=None)
            torch.manual_seed(0)
            model, batch = Transformer(64, 4).to(sim.device), _tokens(96, 32, sim.device)
            before = sim.allocated_bytes
            _loss_of(model)(batch).backward()
            model.zero_grad()
            counter = CompileCounterWithBackend("aot_eager")
            fn = _FORMS[name](model, counter)
            sim.budget_bytes = before + (sim.peak_bytes - before) // 3
            statistics().reset()
            started = time.process_time()
            size = step(fn, batch, predict=predict).micro_batch
            elapsed_s = time.process_time() - started
            how = "predicted" if predict else "tried"
            failures = f"{statistics().ooms} failures, {counter.frame_count} graphs"
            note = f"{failures}, micro-batches of {size}"
            yield Row(
                f"first step of {name} compiled, its size {how}", f"{elapsed_s:.1f} s", note=note
            )


# --- what the compiler keeps


def _mlp() -> tuple[nn.Module, Tensor]:
    blocks = [
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)
    ]  # fmt: skip
    return nn.Sequential(*blocks, nn.Linear(64, 10)), torch.randn(512, 64)


def _cnn() -> tuple[nn.Module, Tensor]:
    blocks = [
        nn.Sequential(nn.Conv2d(n, 2 * n, 3, padding=1), nn.GroupNorm(2, 2 * n), nn.ReLU())
        for n in (4, 8)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(*blocks, head), torch.randn(64, 4, 16, 16)


def _transformer(*, dropout: float = 0.0, checkpoints: bool = False) -> tuple[nn.Module, Tensor]:
    model = Transformer(64, 2, dropout=dropout)
    model.checkpoints = checkpoints
    return model, torch.randint(100, (64, 32))


_MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP": _mlp,
    "CNN": _cnn,
    "transformer": _transformer,
    "transformer with dropout": lambda: _transformer(dropout=0.1),
    "transformer with checkpoints": lambda: _transformer(checkpoints=True),
}


def memory_rows() -> Iterator[Row]:
    """The peak of a compiled step against that which is predicted, which is that of eager code."""
    for name, make in _MODELS.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = make()
        y = torch.randint(10, (len(x),))
        compiled = torch.compile(model)

        def train(compiled: Any = compiled, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(compiled(x), y)

        report = predict_peak(train)
        train().backward()
        model.zero_grad()
        peak_bytes = _peak_of(train)
        ratio = peak_bytes / (report.peak_bytes - report.baseline_bytes)
        yield Row(f"peak of a step compiled by inductor / predicted: {name}", f"{ratio:.2f}")


def _peak_of(train: Callable[[], Tensor]) -> int:
    allocations.begin()
    train().backward()
    changes = allocations.end()
    assert changes is not None
    live_bytes = peak_bytes = 0
    for n_bytes in changes.cpu:
        live_bytes += n_bytes
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes


def main() -> None:
    """Measure every row and publish the table."""
    torch.set_num_threads(1)
    # before any backward pass: autograd's engine counts devices once
    with simulated_accelerator() as sim:
        rows = [*graph_rows(), *first_call_rows(sim), *memory_rows()]
    publish("compiled", rows)


if __name__ == "__main__":
    main()
