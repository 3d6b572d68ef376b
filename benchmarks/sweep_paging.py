"""Page every module and architecture that is here, in a ring for one part, and compare bit for bit.

`python -m benchmarks.sweep_paging [modules|transformers|vision ...] [--only NAME ...]` writes the
verdicts to `results/paging_sweep.json`, those of other groups left as they are. It takes an hour of
one core; the tests run a part of it.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks import _corpus_modules, _corpus_transformers, _corpus_vision
from benchmarks._paged_cycles import Call, Cycles, call_of, moved_whole, with_eager_experts
from benchmarks._record import results_path
from tenure.testing import Simulator, simulated_accelerator

_Part = tuple[str, Callable[[bool], Iterator[tuple[nn.Module, Call]]]]


def _modules() -> Iterator[_Part]:
    for name in _corpus_modules.names():

        def build(training: bool, name: str = name) -> Iterator[tuple[nn.Module, Call]]:
            for sample in _corpus_modules.samples_of(name, training=training):
                yield sample.module, Call("", *sample[1:])

        yield name, build


def _architectures(corpus: Any) -> Iterator[_Part]:
    for architecture in corpus.architectures():

        def build(training: bool, made: Any = architecture) -> Iterator[tuple[nn.Module, Call]]:
            torch.manual_seed(0)
            step = made.build(made.sizes[0])
            with_eager_experts(step.model)
            yield step.model.train(training), call_of(step, made.family)

        yield architecture.name, build


_GROUPS: dict[str, Callable[[], Iterator[_Part]]] = {
    "modules": _modules,
    "transformers": lambda: _architectures(_corpus_transformers),
    "vision": lambda: _architectures(_corpus_vision),
}


def _verdict(sim: Simulator, model: nn.Module, call: Call, *, trains: bool) -> str:
    sim()
    try:
        with torch.set_grad_enabled(trains):
            there = moved_whole(model, sim.device)
            there(*sim_copy(sim, call.args), **sim_copy(sim, call.kwargs))
    except Exception as error:
        return f"does not run whole: {type(error).__name__}: {str(error)[:120]}"
    sim()
    try:
        found = Cycles(sim, model, trains=trains).differences([call])
        sim.finish()
    except Exception as error:
        sim.take_faults()
        return f"raises {type(error).__name__}: {str(error)[:400]}"
    return "; ".join(found[:3]) or "equal"


def sim_copy(sim: Simulator, tree: Any) -> Any:
    """Arguments on the device."""
    move: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.detach().to(sim.device)  # noqa: E731
    return tree_map_only(torch.Tensor, move, tree)


def _row(
    sim: Simulator, build: Callable[[bool], Iterator[tuple[nn.Module, Call]]]
) -> dict[str, Any]:
    """The verdicts of one name, each with how often it was given."""
    row: dict[str, Any] = {}
    began_s = time.process_time()
    for what, training, trains in (
        ("inference", False, False),
        ("batch statistics", True, False),
        ("training", True, True),
    ):
        counts: dict[str, int] = {}
        try:
            for model, call in build(training):
                verdict = _verdict(sim, model, call, trains=trains)
                counts[verdict] = counts.get(verdict, 0) + 1
        except Exception as error:
            counts[f"can't be built: {type(error).__name__}: {str(error)[:120]}"] = 1
        row[what] = counts
    return row | {"cpu_s": round(time.process_time() - began_s, 2)}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[], help="these names alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # Reformer seeds its dropout by this, which asks the system for entropy.
    torch.seed = torch.initial_seed
    path = results_path("paging_sweep")
    with simulated_accelerator() as sim:
        for group in options.groups or _GROUPS:
            for name, build in _GROUPS[group]():
                if options.only and name not in options.only:
                    continue
                row = _row(sim, build)
                print(name, row, flush=True)
                told = json.loads(path.read_text()) if path.exists() else {}
                told.setdefault(group, {})[name] = row
                path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
