"""How close the predicted peak of a training step is to what the allocator really gives it.

Every architecture of the corpus at each of its sizes, the step of its optimizer included, beside
fake tensors alone and torch-kitsune. ``--quick`` takes a dozen, ``--only TEXT`` those with it in
their name. torchvision, timm and torch-kitsune count where they are installed.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import _corpus_plain, _corpus_transformers, _corpus_vision
from benchmarks._cases import measured, p99
from benchmarks._prediction_rows import Case, errors, measure
from benchmarks._record import Row, publish
from benchmarks._training_steps import Architecture
from tenure._torch import cpu_allocator

_AT_ONCE = 20
_SECONDS_EACH = 120
_CASES = Path(__file__).parent / "results" / "predict_cases.json"
_QUICK = """
    plain/mlp plain/cnn_with_batch_norm plain/u-net plain/conv1d plain/lstm plain/tied_weights
    plain/checkpointed_blocks plain/bfloat16_autocast plain/physics-informed optimizers/Muon
    transformers/gpt2 transformers/mixtral transformers/t5 transformers/vit
"""


def corpus() -> dict[str, Architecture]:
    """All architectures by name."""
    corpora = _corpus_plain, _corpus_transformers, _corpus_vision
    found = [each for corpus in corpora for each in corpus.architectures()]
    return {each.name: each for each in found}


def main() -> None:
    """Measure all that was asked for and publish the table; as a worker, print each case."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--only", default="")
    arguments.add_argument("--into", type=Path, default=_CASES, help="where the cases go")
    arguments.add_argument("--of", type=Path, nargs="+", help="publish cases measured before")
    arguments.add_argument("--worker", default="")
    given = arguments.parse_args()
    # so that no kernel's buffers depend on the machine
    torch.set_num_threads(1)
    if given.worker:
        _work(given.worker.split("|"))
        return
    names = [name for name in corpus() if given.only in name]
    if given.quick:
        names = [name for name in names if name.replace(" ", "_") in _QUICK.split()]
    cases = []
    for case in _read(given.of) if given.of else _measured(names):
        cases.append(case)
        given.into.write_text(json.dumps([asdict(case) for case in cases], indent=0) + "\n")
    if not given.only:
        publish("predict", [*summary(cases)])


def _work(names: Sequence[str]) -> None:
    """Measure some architectures in this process, and print a line of JSON for each case."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    # blocks that exist before a session is opened are seen to end
    cpu_allocator.keep_sizes()
    known = corpus()
    for name in names:
        for size in known[name].sizes:
            case = measure(known[name], size, with_kitsune=size == known[name].sizes[1])
            print(json.dumps(asdict(case)), flush=True)


def _measured(names: Sequence[str]) -> Iterator[Case]:
    """Yield the cases, and print a line for each."""
    for name, fields in measured("bench_predict", names, _AT_ONCE, _SECONDS_EACH):
        if fields is None:
            print(f"{name}: its process ended", flush=True)
            yield Case(name, corpus()[name].family, 0, failure="its process ended")
            continue
        case = Case(**fields)
        print(_line(case), flush=True)
        yield case


def _read(paths: Sequence[Path]) -> list[Case]:
    return [Case(**each) for path in paths for each in json.loads(path.read_text())]


def _line(case: Case) -> str:
    if case.failure:
        return f"{case.name} {case.size}: no truth: {case.failure}"
    parts = [f"{case.name:44} {case.size:4} {case.true_bytes / 2**20:9.2f} MiB"]
    for what, n_bytes in (
        ("tenure", case.predicted_bytes),
        ("naive", case.naive_bytes),
        ("kitsune", case.kitsune_bytes),
    ):
        error = case.error_of(n_bytes)
        parts.append(f"{what} {'     -   ' if error is None else f'{error:+9.3%}'}")
    mark = "low" * (case.error is not None and case.error < 0)
    parts.append(f"{mark:3} {'approximate' * case.approximate:11}")
    parts.append(f"{case.predict_s:6.2f} s / {case.step_s:6.2f} s")
    why = "; ".join(case.reasons) if case.approximate or case.predicted_bytes is None else ""
    return "  ".join([*parts, why[:150]])


def summary(cases: Sequence[Case]) -> Iterator[Row]:
    """The table: how good each prediction is, over all cases."""
    measured = [case for case in cases if not case.failure]
    names = {case.name for case in measured}
    counted = f"{len(names)} architectures, {len(measured)} steps"
    ours = errors(measured, lambda case: case.predicted_bytes)
    if ours:
        yield from _ours(measured, ours, counted)
    for what, found in (
        ("fake tensors alone", errors(measured, lambda case: case.naive_bytes)),
        ("torch-kitsune, at the middle sizes", errors(measured, lambda case: case.kitsune_bytes)),
    ):
        if found:
            size = [abs(error) for error in found]
            note = f"{_low(found)} too low of the {len(found)} that it predicts"
            value = f"{statistics.median(size):.2%}, {p99(size):.2%}"
            yield Row(f"{what}: median, p99 of the error", value, note=note)
    failed = [f"{case.name} ({case.failure[:60]})" for case in cases if case.failure]
    if failed:
        yield Row(
            "architectures whose step does not run here", str(len(failed)), note="; ".join(failed)
        )


def _ours(cases: Sequence[Case], found: Sequence[float], counted: str) -> Iterator[Row]:
    size = [abs(error) for error in found]
    median, most, low = statistics.median(size), p99(size), _low(found)
    yield Row("median error", f"{median:.3%}", "<= 1 %", median <= 0.01, counted)
    yield Row("p99 of the error", f"{most:.2%}", "<= 2 %", most <= 0.02)
    sure = p99([abs(c.error) for c in cases if c.error is not None and not c.approximate])
    yield Row("p99 of the error, where it is not said to be approximate", f"{sure:.2%}")
    lows = [case for case in cases if case.error is not None and case.error < 0]
    lows.sort(key=lambda case: case.error or 0)
    worst = ", ".join(f"{case.name} {case.size} {case.error:+.3%}" for case in lows[:5])
    yield Row("predictions that are too low", str(low), "0", low == 0, worst)
    silent = [c for c in cases if c.error is not None and abs(c.error) > 0.02 and not c.approximate]
    yield Row(
        "off by more than 2 % without saying so",
        str(len(silent)),
        "0",
        not silent,
        ", ".join(f"{case.name} {case.size} {case.error:+.1%}" for case in silent[:8]),
    )
    n_approximate = sum(case.approximate for case in cases)
    yield Row("predictions that say they are approximate", f"{n_approximate / len(cases):.1%}")
    refused = [case for case in cases if case.predicted_bytes is None]
    note = ", ".join(sorted({case.name for case in refused}))
    yield Row("steps that it refuses to predict", str(len(refused)), note=note)
    ratio = statistics.median(case.predict_s / case.step_s for case in cases if case.step_s)
    seconds = statistics.median(case.predict_s for case in cases)
    yield Row(
        "time of a prediction, median", f"{seconds:.2f} s", note=f"{ratio:.1f} times the step"
    )


def _low(found: Sequence[float]) -> int:
    return sum(error < 0 for error in found)


if __name__ == "__main__":
    main()
