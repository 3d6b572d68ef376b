"""How close ``tenure fit MODEL`` is to steps that really ran, and to real ranks of gloo.

Every family of the corpus of transformers that a configuration alone makes, with few and narrow
layers: what is predicted from its ``config.json``, and what the allocator gave the first step.
``--only TEXT`` takes those with it in their name. Then FSDP2 for 8 to 1024 ranks, beside
what 2 and 4 processes take, and beside the tracker that torch has for FSDP2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from benchmarks import _corpus_transformers as corpus
from benchmarks._cases import measured, p99
from benchmarks._record import Row, publish, results_path
from benchmarks._step_truth import true_peak
from benchmarks._training_steps import Step
from benchmarks.tables import main as write_tables
from tenure._cli._fleet import Setup
from tenure._cli._fleet._configured import Configured
from tenure._cli._fleet._work import in_memory, making, shard
from tenure._torch import cpu_allocator
from tenure._torch.fake_ranks import fake_ranks
from tenure.adaptive import memory_budget, predict_peak
from tenure.adaptive._predict import Work
from tenure.adaptive._predict._predict import report_of

_AT_ONCE, _SECONDS_EACH = 12, 90
_SIDE = {"image_size": 64, "patch_size": 8}
_RANKS = (2, 4, 8, 16, 64, 256, 1024)
_MEASURED = (2, 4)
_OF_RANKS: dict[str, int] = {
    "hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One family.

    Attributes:
        name: the type of the model.
        true_bytes: the peak of the step that ran.
        predicted_bytes: what was predicted.
        failure: why there is no figure.
        refused: whether the prediction was refused by name.
    """

    name: str
    true_bytes: int = 0
    predicted_bytes: int = 0
    failure: str = ""
    refused: bool = False

    @property
    def error(self) -> float:
        """How far the prediction is off; negative if too low."""
        return self.predicted_bytes / self.true_bytes - 1


def families() -> dict[str, dict[str, Any]]:
    """The values of each configuration beside those that the corpus has, by the type of model."""
    texts = f"{corpus._CAUSAL} {corpus._MASKED} {corpus._SEQUENCE_TO_SEQUENCE}".split()
    images = [name for name in corpus._IMAGES.split() if name != "siglip"]
    sized = {name: corpus._OWN.get(name, {}).get("image_size") for name in images}
    return {
        **{name: {} for name in texts},
        **{name: {} if size else dict(_SIDE) for name, size in sized.items()},
    }


def measure(name: str, folder: str) -> Case:
    """Predict the step of a family from its configuration, and run it."""
    config = corpus.small_config(name, **families()[name])
    config.save_pretrained(folder)
    setup = Setup(folder, batch=2, sequence=None if name in _of_images() else corpus._TOKENS)
    try:
        found = Configured(setup)
        with making(setup, found) as made:
            batch = found.batch(setup.batch, torch.device("meta"))
            report = predict_peak(made.fn, batch, optimizer=made.optimizer, device="cpu")
    # the command tells errors of a library in a sentence, too
    except Exception as error:
        return Case(name, failure=str(error).partition("\n")[0], refused=True)
    try:
        model, batch = in_memory(setup, found, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step = Step(model, lambda batch: model(**batch).loss, (batch,))
        truth = true_peak(step, optimizer)
    # of a library, or of a configuration that no model runs with
    except Exception as error:
        return Case(name, failure=f"no truth: {error!r}"[:200])
    return Case(name, truth.peak_bytes, report.peak_bytes)


def _of_images() -> set[str]:
    return set(corpus._IMAGES.split())


def _work(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    cpu_allocator.keep_sizes()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(measure(name, folder))), flush=True)


def _measured(names: list[str]) -> Iterator[Case]:
    """Yield the cases, and print a line for each."""
    for name, fields in measured("bench_fleet", names, _AT_ONCE, _SECONDS_EACH):
        case = Case(name, failure="its process ended") if fields is None else Case(**fields)
        told = case.failure or f"{case.true_bytes} {case.predicted_bytes} {case.error:+.3%}"
        print(f"{case.name:24} {told}", flush=True)
        yield case


def summary(cases: list[Case]) -> Iterator[Row]:
    """The table of families."""
    good = [case for case in cases if not case.failure]
    errors = sorted(abs(case.error) for case in good)
    most = p99(errors)
    lows = [case for case in good if case.error < 0]
    worst = sorted(good, key=lambda case: -abs(case.error))[:3]
    yield Row(
        "configurations whose first step was measured", str(len(good)), ">= 60", len(good) >= 60
    )
    note = ", ".join(f"{case.name} {case.error:+.2%}" for case in worst)
    yield Row("error, p99", f"{most:.2%}", "<= 1 %", most <= 0.01, note)
    yield Row("error, median", f"{errors[len(errors) // 2]:.3%}")
    note = ", ".join(f"{case.name} {case.error:+.3%}" for case in lows)
    yield Row("too low", str(len(lows)), "0", not lows, note)
    for what, failed in (
        ("refused by name", [case.name for case in cases if case.refused]),
        ("without a truth", [c.name for c in cases if c.failure and not c.refused]),
    ):
        yield Row(what, str(len(failed)), note=", ".join(failed))


def _setup(folder: str, ranks: int) -> Setup:
    return Setup(folder, batch=1, sequence=64, ranks=ranks)


def _ours(folder: str, ranks: int) -> int:
    """Predict what a budget of a rank would count."""
    setup = _setup(folder, ranks)
    found = Configured(setup)
    with making(setup, found) as made:
        batch = found.batch(setup.batch, torch.device("meta"))
        work = Work(made.fn, (batch,), {}, made.optimizer, None)
        report = report_of(work, is_counted=True)
        return report.peak_bytes


def _of_a_rank(rank: int, folder: str, ranks: int, store: str, found: Any) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
    torch.set_num_threads(1)
    # a thread of gloo may hold what it has sent for a moment longer
    found[rank] = min(_counted(_setup(folder, ranks)) for _ in range(4))
    dist.destroy_process_group()


def _counted(setup: Setup) -> int:
    model, batch = in_memory(setup, Configured(setup), torch.device("cpu"))
    mesh = init_device_mesh("cpu", (setup.ranks,))
    shard(model, mesh, offloads=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with memory_budget("8GiB") as budget:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    return budget.peak_bytes + _held(model, batch)


def _held(model: Any, batch: Any) -> int:
    """Count the bytes that a budget leaves out, because they were there before."""
    n_bytes: int = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    n_bytes += sum(each.nbytes for each in (*model.buffers(), *batch.values()))
    return n_bytes


def _by_gloo(folder: str, ranks: int) -> list[int]:
    with tempfile.TemporaryDirectory() as place, multiprocessing.Manager() as manager:
        found = manager.dict()
        spawn(_of_a_rank, (folder, ranks, f"{place}/store", found), nprocs=ranks)
        return sorted(found.values())


def _by_tracker(folder: str, ranks: int) -> int:
    """The same of torch's own tracker, which runs the step with data."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    setup = _setup(folder, ranks)
    with fake_ranks(0, ranks):
        model, batch = in_memory(setup, Configured(setup), torch.device("cpu"))
        shard(model, init_device_mesh("cpu", (ranks,)), offloads=False)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            model(**batch).loss.backward()
            optimizer.step()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def of_ranks() -> None:
    """Write the table of ranks."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus._config_class("llama")(**_OF_RANKS).save_pretrained(folder)
        for ranks in _RANKS:
            measured = _by_gloo(folder, ranks) if ranks in _MEASURED else []
            shown = (
                [f"{n:,}" for n in dict.fromkeys((measured[0], measured[-1]))] if measured else []
            )
            rows.append({
                "ranks": str(ranks),
                "predicted": f"{_ours(folder, ranks):,}",
                "measured, least and most": " to ".join(shown),
                "torch's tracker": f"{_by_tracker(folder, ranks):,}",
            })  # fmt: skip
            print(rows[-1], flush=True)
    path = results_path("fleet_ranks")
    path.write_text(json.dumps({"columns": list(rows[0]), "rows": rows}, indent=1) + "\n")
    write_tables()


def main() -> None:
    """Measure all that was asked for and publish the tables; as a worker, print each case."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--ranks", action="store_true", help="the table of ranks alone")
    arguments.add_argument("--worker", default="")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.worker:
        _work(given.worker.split("|"))
        return
    if not given.ranks:
        cases = list(_measured([name for name in families() if given.only in name]))
        if not given.only:
            publish("fleet", [*summary(cases)])
    if not given.only:
        of_ranks()


if __name__ == "__main__":
    main()
