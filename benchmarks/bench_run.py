"""What `tenure run` costs a training loop beside `python`, in time of the processor."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile

from benchmarks._record import Row, publish

_ROUNDS = 3
_PROGRAM = """
import sys, time, torch
torch.set_num_threads(1)
width, batch, n_steps = map(int, sys.argv[1:])
layers = torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
data = torch.ones(batch, width)
began = time.process_time()
for _ in range(n_steps):
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
print(time.process_time() - began)
"""
_SMALL, _LARGE = ("16", "8", "50000"), ("512", "1024", "1000")


def main() -> None:
    """Measure every row, and write the record."""
    publish(
        "run",
        [
            _row("loop of steps of 0.2 ms", _SMALL, (), 1.25),
            _row("loop of steps of 10 ms", _LARGE, (), 1.05),
            _row("loop of steps of 10 ms, --timeline", _LARGE, ("--timeline",), 1.15),
        ],
    )


def _row(what: str, arguments: tuple[str, ...], options: tuple[str, ...], bar: float) -> Row:
    plain: list[float] = []
    ratios: list[float] = []
    for _ in range(_ROUNDS):
        plain.append(_seconds([], arguments))
        ratios.append(_seconds(["-m", "tenure", "run", "-q", *options], arguments) / plain[-1])
    ratio = statistics.median(ratios)
    step_ms = statistics.median(plain) / int(arguments[-1]) * 1e3
    spread = f"{min(ratios):.3f}..{max(ratios):.3f}; plain {step_ms:.3f} ms a step"
    return Row(what, f"{ratio:.3f}", f"<= {bar}", ratio <= bar, spread)


def _seconds(command: list[str], arguments: tuple[str, ...]) -> float:
    """The seconds that the loop of the program takes."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *command, "-c", _PROGRAM, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return float(done.stdout)


if __name__ == "__main__":
    main()
