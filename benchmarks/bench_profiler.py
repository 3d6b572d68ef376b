"""What the line profiler costs: per operation, per line, per training step, beside its peers."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._pairs import Loop, Pair, time_pair
from benchmarks._record import Row, publish
from tenure.profiler import LineProfiler

_A = torch.ones(8)


class Gpt(nn.Module):
    """Four small blocks of causal attention over 128 tokens, where bookkeeping weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(64, 100)
        self.mask = nn.Buffer(nn.Transformer.generate_square_subsequent_mask(128))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each token."""
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.mask)
        logits: Tensor = self.head(x)
        return logits


class Attention(nn.Module):
    """Causal attention written line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """What each token takes from those before it."""
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // 4) ** 0.5
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(n, tokens, width)
        found: Tensor = self.out(y)
        return found


class Block(nn.Module):
    """Attention and a small network, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(64), nn.LayerNorm(64), Attention()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Both, each added to what it got."""
        h = self.first(x)
        x = x + self.attention(h)
        h = self.second(x)
        h = F.gelu(self.up(h))
        h = self.down(h)
        both: Tensor = x + h
        return both


class PlainGpt(nn.Module):
    """A GPT whose step takes about 10 ms: every line of its own modules can be profiled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(100, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each token."""
        places = torch.arange(tokens.shape[1])
        x = self.embed(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


class DispatchLedger(TorchDispatchMode):
    """The least that a ledger of tensors can do: look at every output's storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            out.untyped_storage().nbytes()
        return out


def helper(runs: int) -> None:
    """Small operations in a function that is not profiled."""
    for _ in range(runs):
        torch.add(_A, _A)


def on_one_line(runs: int) -> None:
    """Small operations, all called from one line."""
    helper(runs)


def on_many_lines(runs: int) -> None:
    """Small operations, each on a line that is begun anew."""
    for _ in range(runs):
        torch.add(_A, _A)


def nothing(runs: int) -> None:
    """A function that is profiled and does not run."""


def leaf() -> None:
    """A function that does nothing, on one line."""


def calls(runs: int) -> None:
    """Calls of a function that is profiled."""
    for _ in range(runs):
        leaf()


def operation_rows() -> list[Row]:
    """What a small operation costs more, in three places, and what a call does."""
    cases: list[tuple[str, Loop, Callable[..., None]]] = [
        ("a + b, far from any profiled function", helper, nothing),
        ("a + b, called from one profiled line", on_one_line, on_one_line),
        ("a + b, each on a profiled line, beside the loop's own", on_many_lines, on_many_lines),
        ("an empty function, called and profiled", calls, leaf),
    ]
    rows = []
    for what, call, profiled in cases:
        profiler = LineProfiler(profiled, device="cpu")

        def enabled(profiler: LineProfiler = profiler) -> LineProfiler:
            return profiler

        pair = time_pair(call, within(enabled, call), rounds=40, runs=1000, clock=time.process_time)
        added_us = (pair.ours_s - pair.base_s) * 1e6
        rows.append(_row(f"profiled / plain: {what}", pair, f"+{added_us:.2f} us; "))
    return rows


def step_rows() -> list[Row]:
    """A training step under each way of measuring it, against the plain step."""
    step, forward = trainer(Gpt()), Gpt.forward
    lines = LineProfiler(step, forward, device="cpu")
    ways: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [
        ("line profiler, step and forward", lambda: lines),
        ("torch.profiler(profile_memory=True), its end included", memory_profile),
        ("bare dispatch mode, outputs only", DispatchLedger),
    ]
    rows = []
    for what, context in ways:
        pair = time_pair(
            repeated(nullcontext, step), repeated(context, step), rounds=30, runs=2,
            clock=time.process_time,
        )  # fmt: skip
        rows.append(_row(f"training step of a small GPT / plain: {what}", pair))
    return rows


def region_rows() -> list[Row]:
    """Ten steps with all functions profiled: in the region alone, and until the report is text."""
    step = trainer(PlainGpt(), shape=(2, 64))
    functions = step, PlainGpt.forward, Block.forward, Attention.forward

    def reported(runs: int) -> None:
        profiler = LineProfiler(*functions, device="cpu")
        with profiler:
            for _ in range(runs):
                step()
        str(profiler)

    def plain(runs: int) -> None:
        for _ in range(runs):
            step()

    enabled = LineProfiler(*functions, device="cpu")
    ways: list[tuple[str, Loop, AbstractContextManager[Any], float]] = [
        ("in the region", within(lambda: enabled, plain), searched_for_nothing(), 1.4),
        ("from enabling it to the printed report", reported, nullcontext(), 2.5),
    ]
    rows = []
    for what, ours, circumstance, bar in ways:
        with circumstance:
            pair = time_pair(plain, ours, rounds=20, runs=10, clock=time.process_time)
        rows.append(_row(f"step of a GPT, every line profiled / plain: {what}", pair, bar=bar))
    return rows


def searched_for_nothing() -> AbstractContextManager[Any]:
    """Without the search for blocks that exist, which has a row of its own."""
    return mock.patch("tenure._stream._process.enter_host_blocks")


def enable_row() -> Row:
    """What it costs to find the blocks that exist already, once for each time it is enabled."""
    profiler, times = LineProfiler(nothing, device="cpu"), []
    for _ in range(10):
        start = time.process_time()
        with profiler:
            pass
        times.append(time.process_time() - start)
    n_objects = len(gc.get_objects())
    note = f"a heap of {n_objects:,} objects is searched for tensors; in no other row"
    return Row("enable and disable", f"{statistics.median(times) * 1e3:.1f} ms", note=note)


def truth_row() -> Row:
    """The sum of all lines against the allocator's own events."""
    step = trainer(Gpt())
    for _ in range(2):
        step()
    with memory_profile() as profile:
        step()
    results: Any = profile.profiler
    sizes = [e.nbytes() for e in results.kineto_results.events() if e.name() == "[memory]"]
    truth = sum(n_bytes for n_bytes in sizes if n_bytes > 0)
    with LineProfiler(step, Gpt.forward, device="cpu") as lines:
        step()
    found = sum(record.allocated_bytes for record in lines.records)
    what = "bytes of all lines / bytes of the allocator's events"
    note = f"{found:,} of {truth:,} bytes in one training step"
    return Row(what, f"{found / truth:.6f}", "exact", found == truth, note)


def memory_profile() -> Any:
    """The profiler of torch, as one turns it on to see memory."""
    return torch.profiler.profile(profile_memory=True, activities=[ProfilerActivity.CPU])


def trainer(model: nn.Module, shape: tuple[int, int] = (4, 128)) -> Callable[[], None]:
    """A training step of a model over a batch of tokens of a shape."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(100, shape)

    def step() -> None:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, -2), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def within(context: Callable[[], AbstractContextManager[Any]], call: Loop) -> Loop:
    """``call`` inside one block of ``context``."""

    def loop(runs: int) -> None:
        with context():
            call(runs)

    return loop


def repeated(context: Callable[[], AbstractContextManager[Any]], step: Callable[[], None]) -> Loop:
    """So many steps inside one block of ``context``."""

    def loop(runs: int) -> None:
        with context():
            for _ in range(runs):
                step()

    return loop


def _row(what: str, pair: Pair, note: str = "", bar: float | None = None) -> Row:
    plain = f"{pair.base_s * 1e6:,.2f} us plain; 10-90 % {pair.low:.3f}-{pair.high:.3f}"
    ratio = f"{pair.ratio:.3f}"
    if bar is None:
        return Row(what, ratio, note=f"{note}{plain}")
    return Row(what, ratio, f"<= {bar}", pair.ratio <= bar, f"{note}{plain}")


def main() -> None:
    """Measure every row and publish the table."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)  # so that the time of the process is that of the work
    torch.manual_seed(0)
    rows = [truth_row(), enable_row(), *region_rows()]
    with searched_for_nothing():
        rows += [*operation_rows(), *step_rows()]
    publish("profiler", rows)


if __name__ == "__main__":
    main()
