"""Libraries that do a part of what tenure does, each beside it, doing the same, in one process.

Those that page a model stand in the table of ``bench_paging``, torch-kitsune in that of
``bench_predict``. One that is not installed, or can't do it here, keeps its row, which says why.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._pairs import Loop, time_pair
from benchmarks._record import Row, publish
from benchmarks.test_micro_adaptive import fill
from tenure import adaptive
from tenure.profiler import MemReporter

_LIMITS = range(100, 500, 40)
"""The largest batches of the functions whose size is looked for, from 512 on."""
_CALLS = 20
_SAMPLES = 9


def main() -> None:
    """Run every peer beside ours and publish the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # each error would be a line
    logging.getLogger("tenure").setLevel(logging.ERROR)
    rows = [*_sizes(), *_koila(), *_memlab(), *_toma()]
    publish("peers", rows, beside="other programs on both cores; times are the process's own")


def _there(package: str, module: str) -> tuple[Any, str]:
    """The module and the name with its version, or None and why not."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(module), f"{package} {metadata.version(package)}"
    except ImportError as error:
        return None, f"{package}: {error}"


def _toma() -> Iterator[Row]:
    toma, name = _there("toma", "toma")
    what = "a loop over 4 chunks of 32 x 16 x 16 numbers"
    if toma is None:
        yield Row(what, "not run", note=name)
        return
    tensor = torch.zeros(128, 16, 16)
    ours = _times(lambda: adaptive.simple.chunked(fill, tensor, 32))
    theirs = _times(lambda: toma.simple.chunked(fill, tensor, 32))
    # it collects garbage at each chunk: one call takes a good part of a second
    yield _pair_row(f"{what}: {name} / tenure", ours, theirs, rounds=5, runs=1)


def _sizes() -> Iterator[Row]:
    """A function that runs out of memory above a size, called again and again."""
    # toma collects garbage at each call: nothing is timed here, so what is there may stay
    gc.freeze()
    yield _size_row("tenure, batch", _tenure_calls)
    for package, calls in (("toma", _toma_calls), ("accelerate", _accelerate_calls)):
        module, name = _there(package, package)
        if module is None:
            yield Row(f"size found / largest: {package}", "not run", note=name)
        else:
            yield _size_row(name, calls)
    gc.unfreeze()


def _size_row(name: str, calls: Callable[[Callable[[int], int]], Callable[[], int]]) -> Row:
    shares, failures = [], []
    for limit in _LIMITS:
        failed: list[int] = []

        def work(size: int, limit: int = limit, failed: list[int] = failed) -> int:
            if size > limit:
                failed.append(size)
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return size

        call = calls(work)
        size = [call() for _ in range(_CALLS)][-1]
        shares.append(size / limit)
        failures.append(len(failed))
        adaptive.reset()
    what = f"size found / largest in {_CALLS} calls that begin with 512: {name}"
    mean = sum(shares) / len(shares)
    average = sum(failures) / len(failures)
    note = f"least {min(shares):.2f}; {average:.1f} errors on average, {max(failures)} at the most"
    return Row(what, f"{mean:.2f}", note=note)


def _tenure_calls(work: Callable[[int], int]) -> Callable[[], int]:
    return adaptive.batch(initial_batchsize=512)(lambda batchsize: work(batchsize))


def _toma_calls(work: Callable[[int], int]) -> Callable[[], int]:
    toma = importlib.import_module("toma").toma
    cache = importlib.import_module("toma").GlobalBatchsizeCache
    call: Callable[[], int] = toma.batch(
        initial_batchsize=512, cache_type=type("OfThisFunction", (cache,), {})
    )(lambda batchsize: work(batchsize))
    return call


def _accelerate_calls(work: Callable[[int], int]) -> Callable[[], int]:
    find = importlib.import_module("accelerate.utils").find_executable_batch_size

    def sized(batch_size: int) -> int:
        return work(batch_size)

    call: Callable[[], int] = find(sized, starting_batch_size=512)
    return call


def _koila() -> Iterator[Row]:
    koila, name = _there("koila", "koila")
    gradient = "largest gradient / that of the whole batch"
    if koila is None:
        yield Row(f"{gradient}: koila", "not run", note=name)
        return
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(_SAMPLES, 28, 28), torch.randint(0, 10, (_SAMPLES,))

    def gradients(*values: Any) -> Tensor:
        net.zero_grad()
        F.cross_entropy(net(values[0]), values[1]).backward()
        found = [parameter.grad for parameter in net.parameters()]
        return torch.cat([g.flatten() for g in found if g is not None])

    whole = gradients(x, y)
    at = whole.abs().argmax()
    on_the_cpu = gradients(*koila.lazy(x, y, batch=0))
    yield Row(f"{gradient}: {name}, CPU", f"{on_the_cpu[at] / whole[at]:.3f}", note="never splits")
    # its split needs a GPU; what it asks of one is whether it is there, and how much is free
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("koila.gpus.free_memory", return_value=10**9),
    ):
        split = gradients(*koila.lazy(x, y, batch=0))
    note = f"{_SAMPLES} samples in 8 and 1, a GPU with 1 GB free pretended"
    yield Row(f"{gradient}: {name}, split", f"{split[at] / whole[at]:.3f}", note=note)
    adaptive.step(lambda b: F.cross_entropy(net(b[0]), b[1]), (x, y), maximum=8)
    net.zero_grad()
    adaptive.step(lambda b: F.cross_entropy(net(b[0]), b[1]), (x, y), maximum=8)
    ours = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    ratio = ours[at] / whole[at]
    yield Row(f"{gradient}: tenure, split", f"{ratio:.3f}", "1.000", bool(abs(ratio - 1) < 1e-5))
    plain = _times(lambda: gradients(x, y))
    ways = {
        name: _times(lambda: gradients(*koila.lazy(x, y, batch=0))),
        "tenure": _times(lambda: gradients(*adaptive.lazy(x, y))),
    }
    for who, recorded in ways.items():
        yield _pair_row(f"lazy step of an MLP, whole: {who} / plain", plain, recorded, rounds=31)


def _memlab() -> Iterator[Row]:
    memlab, name = _there("pytorch-memlab", "pytorch_memlab")
    what = "bytes in its report / bytes of a model"
    if memlab is None:
        yield Row(f"{what}: pytorch_memlab", "not run", note=name)
        return
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    true_bytes = sum(p.nbytes for p in model.parameters())
    ours = _quiet(MemReporter(model).report).categories["parameters"]
    theirs = memlab.MemReporter(model)
    theirs.collect_tensor()
    theirs.get_stats()
    told = sum(
        n_bytes
        for rows in theirs.device_tensor_stat.values()
        for label, _, _, n_bytes in rows
        if label.endswith(".weight")
    )
    yield Row(f"{what}: {name}", f"{told / true_bytes:.2f}", note="bytes times bytes of an element")
    yield Row(f"{what}: tenure", f"{ours / true_bytes:.2f}", "1.00", ours == true_bytes)
    yield _pair_row(
        f"a report: tenure / {name}",
        _times(lambda: _quiet(memlab.MemReporter(model).report)),
        _times(lambda: _quiet(MemReporter(model).report)),
        rounds=5,
        runs=1,
    )
    yield Row(f"line profiler: {name}", "not run", note=_lines(memlab))


def _lines(memlab: Any) -> str:
    """What its line profiler answers on this machine."""

    def work() -> None:
        torch.zeros(1024)

    with memlab.LineProfiler(work) as profiler:
        work()
    answer = _quiet(lambda: str(profiler.display()))
    there = "a CUDA device" if torch.cuda.is_available() else "no CUDA device"
    return f"{there}; it answers: {answer.strip().splitlines()[0]}"


def _quiet(call: Callable[[], Any]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return call()


def _times(call: Callable[[], object]) -> Loop:
    def loop(runs: int) -> None:
        for _ in range(runs):
            call()

    return loop


def _pair_row(what: str, base: Loop, other: Loop, *, rounds: int, runs: int = 5) -> Row:
    pair = time_pair(base, other, rounds=rounds, runs=runs, clock=time.process_time)
    note = f"{pair.base_s * 1e6:,.0f} us; 10-90 % {pair.low:.2f}-{pair.high:.2f}"
    return Row(what, f"{pair.ratio:,.2f}", note=note)


if __name__ == "__main__":
    main()
