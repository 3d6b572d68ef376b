"""What reading ahead gains where weights come from a disk, and what memory that takes."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks._pairs import Loop, Pair, time_pair
from benchmarks._record import Row, publish
from tenure.paging import PagedModel, load_paged, page

_MIB = 2**20
_WIDTH, _LAYERS = 2048, 16
_BUDGET_BYTES = 64 * _MIB
_UNITS = (50, 400)
_BATCHES = {"a few rows": 4, "computing about as long as reading": 64}


def main() -> None:
    """Measure, print, and write the results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.safetensors"
        save_file(build("cpu").state_dict(), path)
        os.sync()  # pages that are yet to be written can't be dropped from the cache
        rows = [memory_row(path)]
        for name, n_rows in _BATCHES.items():
            rows += speed_rows(path, name, torch.ones(n_rows, _WIDTH))
        rows.append(units_row(Path(folder)))
    publish("paging_disk", rows)


def build(device: str) -> nn.Module:
    """256 MiB of weights."""
    with torch.device(device):
        layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
    return nn.Sequential(*layers).eval()


def load(path: Path, prefetch: str | int = "auto") -> PagedModel:
    """The model, paged from its file on the CPU."""
    return load_paged(build("meta"), path, "cpu", budget=_BUDGET_BYTES, prefetch=prefetch)


def memory_row(path: Path) -> Row:
    """The peak of the process while a model is loaded and runs, by the kernel's count."""
    x = torch.ones(4, _WIDTH)
    nn.Linear(_WIDTH, _WIDTH)(x)
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    with load(path) as handle:
        for _ in range(3):
            handle(x)
        peak_bytes = status_bytes("VmHWM") - before_bytes
        weight_bytes = handle.plan.weight_bytes
    return Row(
        "peak of the process above its start / budget",
        f"{peak_bytes / _BUDGET_BYTES:.3f}",
        note=f"{peak_bytes / _MIB:.0f} MiB for {weight_bytes / _MIB:.0f} MiB of weights",
    )


def speed_rows(path: Path, name: str, x: Tensor) -> list[Row]:
    """Passes that read ahead against passes that read when a layer is reached, and plain ones."""
    with ExitStack() as paged:
        ahead, at_use = (paged.enter_context(load(path, each)) for each in ("auto", 0))
        rows = []
        for state, before in (("from the disk", dropping(path)), ("from the page cache", nothing)):
            pair = time_pair(passes(at_use, x, before), passes(ahead, x, before), rounds=11, runs=1)
            rows.append(row(f"reading ahead / at use, {state}: {name}", pair))
    plain = build("cpu")
    with load(path) as handle:
        pair = time_pair(passes(plain, x, nothing), passes(handle, x, nothing), rounds=11, runs=1)
    return [*rows, row(f"paged from the page cache / all in memory: {name}", pair)]


def units_row(folder: Path) -> Row:
    """What the pager does for one unit, where there are many against where there are few."""
    x, elapsed_s = torch.ones(1, 16), []
    for n_units in _UNITS:
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(n_units)]).eval()
        plain = copy.deepcopy(model)
        with page(model, "cpu", 1, budget=n_units * 1536 // 2, host=folder):
            pair = time_pair(
                passes(plain, x, nothing),
                passes(model, x, nothing),
                rounds=11,
                runs=3,
                clock=time.process_time,
            )
        elapsed_s.append((pair.ratio - 1) * pair.base_s / n_units)
    few, many = _UNITS
    return Row(
        f"a unit of {many} / a unit of {few}",
        f"{elapsed_s[1] / elapsed_s[0]:.2f}",
        "<= 1.3",
        elapsed_s[1] <= 1.3 * elapsed_s[0],
        f"{elapsed_s[0] * 1e6:.0f} us a unit",
    )


def passes(model: Callable[[Tensor], Tensor], x: Tensor, before: Callable[[], None]) -> Loop:
    """A loop of passes."""

    def loop(runs: int) -> None:
        for _ in range(runs):
            before()
            model(x)

    return loop


def dropping(path: Path) -> Callable[[], None]:
    """Let the system forget what it has read of a file."""

    def drop() -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    return drop


def nothing() -> None:
    """Leave the cache as it is."""


def row(what: str, pair: Pair) -> Row:
    """A ratio, its base and its spread."""
    spread = f"10-90 % {pair.low:.3f}-{pair.high:.3f}"
    return Row(what, f"{pair.ratio:.3f}", note=f"{pair.base_s * 1e3:,.0f} ms without; {spread}")


def status_bytes(what: str) -> int:
    """A figure of this process as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


if __name__ == "__main__":
    main()
