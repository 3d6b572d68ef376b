"""What waiting for an out-of-memory error costs a training step, and a call of torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._models import ResNet18, Transformer
from benchmarks._pairs import Loop, time_pair
from benchmarks._record import Row, publish
from tenure.profiler import OomRecorder, record_oom

_BAR = 1.05
# the first steps of an optimizer are watched, and are no news after that
_FIRST_RUNS = 3


def main() -> None:
    """Measure every row, and write the record."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformer, resnet = Transformer(), ResNet18()
    publish(
        "record_oom",
        [
            _row("GPT-like step of 10 ms (4 layers of 64, AdamW)", _training(*_small()), 1, 200),
            _row("4-layer transformer step (d=512)", _training(transformer, *_tokens()), 1, 15),
            _row("ResNet-18 step", _training(resnet, *_images()), 1, 25),
            _row("add of 8 floats (informs)", _adding(), 20_000, 11, bar=False),
        ],
    )


def _row(what: str, run: Loop, runs: int, rounds: int, *, bar: bool = True) -> Row:
    with record_oom(quiet=True) as recorder:
        run(_FIRST_RUNS)
        plain = _without(recorder, run)
        pair = time_pair(plain, run, rounds=rounds, runs=runs, clock=time.process_time)
    spread = f"10..90 %: {pair.low:.3f}..{pair.high:.3f}; plain {pair.base_s * 1e3:.4f} ms"
    told = f"<= {_BAR}" if bar else ""
    return Row(what, f"{pair.ratio:.3f}", told, not bar or pair.ratio <= _BAR, spread)


def _without(recorder: OomRecorder, run: Loop) -> Loop:
    """The same without what sees errors: single steps can take turns, which outweighs noise."""
    watch = recorder._watch

    def plain(runs: int) -> None:
        watch.set_aside()
        run(runs)
        watch.set_back()

    return plain


def _training(model: nn.Module, inputs: Tensor, targets: Tensor) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run(runs: int) -> None:
        for _ in range(runs):
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def _adding() -> Callable[[int], object]:
    x = torch.ones(8)

    def run(runs: int) -> None:
        for _ in range(runs):
            _ = x + x

    return run


def _small() -> tuple[nn.Module, Tensor, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, 64), encoder, nn.Linear(64, 256))
    return model, torch.randint(256, (4, 64)), torch.randint(256, (4, 64))


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(1000, (4, 64)), torch.randint(1000, (4, 64))


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 64, 64), torch.randint(10, (4,))


if __name__ == "__main__":
    main()
