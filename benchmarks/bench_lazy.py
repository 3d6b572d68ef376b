"""What recording a training step costs: beside the plain step, and beside accumulation by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._pairs import Loop, time_pair
from benchmarks._record import Row, publish
from tenure import adaptive
from tenure.adaptive._lazy import _split
from tenure.adaptive._step import StepOptions, StepResult, StepSpec

_BAR = 1.15
_ROUNDS = 7
_PARTS = 4
_PLAIN_STEP = _split.run_step  # type: ignore[attr-defined]


def _transformer() -> tuple[nn.Module, Tensor, Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Linear(512, 100))
    return model, torch.randn(8, 32, 512), torch.randint(0, 100, (8, 32))


def _cnn() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    return model, torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))


def _loops(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Loop, Loop, Loop]:
    """A step with plain tensors, with recorded ones, and accumulated by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def run(backward: Callable[[], object]) -> Loop:
        def loop(runs: int) -> None:
            for _ in range(runs):
                optimizer.zero_grad()
                backward()
                optimizer.step()

        return loop

    def by_hand() -> None:
        for a, b in zip(x.chunk(_PARTS), y.chunk(_PARTS), strict=True):
            (loss_of(a, b) * (len(a) / len(x))).backward()

    return (
        run(lambda: loss_of(x, y).backward()),
        run(lambda: loss_of(*adaptive.lazy(x, y)).backward()),
        run(by_hand),
    )


def _split_always(n: int) -> None:
    """As where the whole has failed, and a quarter of it is what fits."""

    def quartered(spec: StepSpec, options: StepOptions, frame: FrameType) -> StepResult:
        result: StepResult = _PLAIN_STEP(spec, replace(options, maximum=n // _PARTS), frame)
        return result

    _split.run_step = quartered  # type: ignore[attr-defined]
    _split._is_known_not_to_fit = lambda tape: True


def _row(what: str, base: Loop, ours: Loop, note: str) -> Row:
    pair = time_pair(base, ours, rounds=_ROUNDS, runs=1)
    value = f"{pair.ratio:.2f}"
    spread = f"{note}, {pair.base_s * 1e3:.0f} ms; {pair.low:.2f} to {pair.high:.2f}"
    return Row(what, value, f"<= {_BAR}", pair.ratio <= _BAR, spread)


def main() -> None:
    """Time both models, whole and in parts, and publish the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = {"transformer, 4 layers of 512": _transformer(), "CNN": _cnn()}
    rows = []
    for name, parts in made.items():
        plain, recorded, _ = _loops(*parts)
        rows.append(_row(f"{name}, whole", plain, recorded, "base: the plain step"))
    fails_whole = _split._is_known_not_to_fit
    for name, parts in made.items():
        _split_always(len(parts[1]))
        _, recorded, by_hand = _loops(*parts)
        # the first splits of a place are verified
        recorded(4)
        rows.append(_row(f"{name}, 4 micro-batches", by_hand, recorded, "base: by hand"))
        _split.run_step = _PLAIN_STEP  # type: ignore[attr-defined]
        _split._is_known_not_to_fit = fails_whole
    publish("lazy", rows)


if __name__ == "__main__":
    main()
