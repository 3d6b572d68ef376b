"""The long form: a table, ``benchmarks/results/soak.json``, and an error if a bar is missed.

``python -m tests.soak PIECE ...`` runs some pieces only; ``--collect`` publishes what each left.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks._record import Row, publish, show

from ..scopes.test_model import Ownership
from . import damage, day, kills, many_scopes, names, random_programs

_FOLDER = Path(__file__).parents[2] / "build" / "soak"
_MIB = 1 << 20
# what the allocator of the C library and its arenas move by between two looks
_RSS_BAR_MIB = 1.0
_SCOPES = 1_000_000
_THREADS, _PROGRAMS_A_THREAD = 64, 50
_MACHINES, _STEPS = 500, 60
_KILLS = 40
_CUTS, _FLIPS = 2000, 2000
_STRIDE = 25


def _growth_rows(what, growth):
    mib = growth.rss_bytes / _MIB
    yield Row(f"{what}: growth of resident memory", f"{max(mib, 0):.2f} MiB",
              f"<= {_RSS_BAR_MIB} MiB", mib <= _RSS_BAR_MIB)  # fmt: skip
    yield _zero(f"{what}: growth of objects of Python", growth.objects, growth.types)
    yield _zero(f"{what}: growth of entries of scopes", growth.entries)


def _zero(what, n, note=""):
    return Row(what, f"{n:,}", "0", n == 0, note)


def _wrong(what, wrong, *notes):
    return _zero(what, len(wrong), "; ".join([*notes, *wrong[:1]]))


def scopes():
    """A million scopes."""
    yield from _growth_rows(f"{_SCOPES:,} scopes", many_scopes.run(_SCOPES))


def threads():
    """Programs in many threads at once."""
    errors, left = random_programs.run_in_threads(_THREADS, _PROGRAMS_A_THREAD)
    what = f"{_THREADS * _PROGRAMS_A_THREAD:,} random programs in {_THREADS} threads"
    yield _wrong(f"{what}: differences from the model", [*map(repr, errors)])
    yield _zero(f"{what}: entries left", sum(left))


def model():
    """Programs that hypothesis makes, and would shrink."""
    ran = {"programs": 0}

    class Counted(Ownership):
        def teardown(self):
            super().teardown()
            ran["programs"] += 1

    fixed = {"derandomize": True, "deadline": None, "database": None}
    chosen = settings(max_examples=_MACHINES, stateful_step_count=_STEPS, **fixed)
    run_state_machine_as_test(Counted, settings=chosen)
    # it raises at the first
    yield _zero(
        f"{ran['programs']:,} programs of hypothesis of up to {_STEPS} steps: "
        "differences from the model",
        0,
    )


def days():
    """A day of training."""
    growth, ran, final = day.run(day.SECONDS, n_warm=10_000)
    what = f"a day of {day.SECONDS:,} steps"
    yield from _growth_rows(what, growth)
    note = f"{ran.retries:,} steps were split, {ran.passes:,} times a model was paged from a folder"
    yield Row(f"{what}: loss at its end", f"{final:.1e}", "< 1e-3", final < 1e-3, note)


def failures():
    """The examples, with an allocation that fails."""
    program = [sys.executable, "-m", "tests.soak.allocations", str(_STRIDE)]
    found = json.loads(subprocess.run(program, check=True, capture_output=True).stdout)
    for name, of_it in found.items():
        what = f"{of_it['met']:,} allocations of examples/{name}.py fail: something left or broken"
        yield _wrong(what, of_it["wrong"], f"among the first {of_it['last']:,} allocations")


def killed():
    """Processes that end by SIGKILL."""
    what = f"{_KILLS} processes killed while paging from a disk: files left or changed"
    yield _wrong(what, kills.run(_KILLS))


def damaged():
    """Files that are cut or flipped."""
    for name, found in damage.run(_CUTS, _FLIPS).items():
        n = found.refused + found.exact + len(found.wrong)
        note = f"{found.refused:,} refused by name, {found.exact:,} read exactly"
        yield _wrong(f"{n:,} damaged copies of {name}: read as something else", found.wrong, note)


def hostile():
    """Names that are markup or commands."""
    shown, refused, wrong = names.run(10**6)
    what = f"{shown:,} reports with a hostile name: more than shown"
    yield _wrong(what, wrong, f"{refused:,} refused")


_PIECES = {
    f.__name__: f for f in (scopes, threads, model, days, failures, killed, damaged, hostile)
}


def run(name):
    """Run a piece, print its table, and leave its rows for `collect`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.process_time()
    rows = list(_PIECES[name]())
    show(f"{name}, {time.process_time() - started:.0f} s of this process", rows)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    _FOLDER.joinpath(f"{name}.json").write_text(json.dumps([asdict(row) for row in rows]))


def collect():
    """Publish the rows of all pieces, and fail if one missed its bar."""
    files = [_FOLDER / f"{name}.json" for name in _PIECES]
    rows = [Row(**row) for file in files for row in json.loads(file.read_text())]
    publish("soak", rows, beside="other programs on both cores")
    missed = [row.what for row in rows if not row.reached]
    sys.exit(f"missed: {missed}" if missed else 0)


if __name__ == "__main__":
    named = [name for name in sys.argv[1:] if name != "--collect"]
    for name in named:
        run(name)
    if not sys.argv[1:]:
        # in a process of its own, so that none grows by what another left
        for name in _PIECES:
            subprocess.run([sys.executable, "-m", "tests.soak", name], check=True)
    if not named:
        collect()
