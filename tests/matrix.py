"""Run `make test` with other pairs of Python and torch, each in a temporary environment.

`make matrix` runs all pairs, `make matrix TORCH=2.15.0 PYTHON=3.12` that pair; either may be left
out. A pair needs some 6 GB of disk, the network, and its Python, on the path or from pyenv.
The counts are kept in ``benchmarks/results/matrix.json`` and shown in ``docs/versions.md``.
`make matrix-short` runs `make test-short` with the newest pair, and keeps nothing.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
COLUMNS = ["Python", "torch", "passed", "failed", "skipped", "minutes", "date"]
# Each supported minor version of torch and each Python is here at least once.
PAIRS = [
    *(("3.11", torch) for torch in ("2.10.0", "2.12.1", "2.14.1", "2.15.0")),
    *(("3.12", torch) for torch in ("2.11.0", "2.13.0", "2.15.0")),
    ("3.13", "2.13.0"),
    ("3.14", "2.13.0"),
]
SHORT = ("3.12", "2.15.0")
# Requirements of a CUDA build of torch without which `import torch` and the CPU work.
# They also work without triton, but then torch logs a warning on stderr.
_OF_A_GPU = "cusolver|nvtx|cuda-bindings"
# A machine may hold torch back by a constraint of its own.
_PIP = {"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_RETRIES": "1"}
# None of the short form's tests asks for them, and they take a minute to install.
_LIBRARIES = re.compile("transformers|peft|torchmetrics|accelerate|lightning|scikit-learn")


class NotHereError(Exception):
    """This machine has no such Python, or can't get that torch."""


def python_named(version):
    """The path of a Python that is installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in [f"python{version}", *pyenv.glob(f"versions/{version}.*/bin/python")]:
        asked = [path, "-c", "import sys; print(sys.executable)"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # pyenv's shim of another version fails
            continue
        return done.stdout.strip()
    raise NotHereError(f"no Python {version} here")


def packages(short):
    """The packages to install beside torch, as arguments of pip."""
    if not short:
        return ["-e", ".[test]"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["test"]
    return ["-e", ".", *(each for each in extra if not _LIBRARIES.match(each))]


def without_gpu(metadata):
    """The metadata of torch less what only a GPU needs, so that pip asks for the rest."""
    text = re.sub(rf"(?m)^Requires-Dist: (nvidia-)?({_OF_A_GPU})\b.*\n", "", metadata)
    # from 2.13 on, one requirement brings several libraries: cuda-toolkit[cublas,cusolver,...]
    return re.sub(rf",({_OF_A_GPU})(?=[\w,]*\])", "", text)


def install(venv, python, torch, short=False):
    """Make an environment with that torch and what its tests ask for."""
    subprocess.run([python, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "-qq", "--no-compile"]
    env = os.environ | _PIP

    def get_torch(*options):
        command = [*pip, *options, f"torch=={torch}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            last_line = done.stderr.strip().rpartition("\n")[2]
            raise NotHereError(f"torch can't be got: {last_line}")

    get_torch("--no-deps")
    (metadata,) = venv.glob("lib/python*/site-packages/torch-*.dist-info/METADATA")
    metadata.write_text(without_gpu(metadata.read_text()))
    get_torch()
    # a failure is one of tenure's requirements from here on, not of the network
    subprocess.run([*pip, f"torch=={torch}", *packages(short)], cwd=ROOT, check=True, env=env)
    for stamp in (".python", ".test"):  # make has nothing to install any more
        (venv / stamp).touch()


def counted(lines):
    """How many tests passed, failed and were skipped, of what pytest and make print."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for line in lines:
        print(line, end="", flush=True)
        if re.match(r"=+ .* in [\d.]+s", line):
            for number, what in re.findall(r"(\d+) (passed|failed|error|skipped)", line):
                counts["failed" if what == "error" else what] += int(number)
        elif re.match(r"make.*: .* Error (?!1 )\d+ \(ignored\)", line):
            counts["failed"] += 1  # pytest broke off
    return counts


def run(venv, target):
    """Run the target of make there, and count its tests."""
    command = ["make", "--ignore-errors", "--no-print-directory", target, f"VENV={venv}"]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    counts = counted(process.stdout)
    if process.wait() or not counts["passed"]:
        raise subprocess.CalledProcessError(process.returncode, command)
    return counts


def row_of(python, torch, short):
    """Run a pair; its row."""
    executable = python_named(python)
    print(f"Python {python} and torch {torch}: installing", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tenure-matrix-") as folder:
        venv = Path(folder) / "venv"
        install(venv, executable, torch, short)
        counts = run(venv, "test-short" if short else "test")
    minutes = round((time.monotonic() - begin) / 60)
    date = datetime.date.today().isoformat()
    return {"Python": python, "torch": torch, **counts, "minutes": minutes, "date": date}


def keep(row):
    """Put the row into the results, in place of an earlier one of the pair."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    pair = (row["Python"], row["torch"])
    rows = [each for each in rows if (each["Python"], each["torch"]) != pair] + [row]
    rows.sort(key=lambda each: [[int(n) for n in each[key].split(".")] for key in COLUMNS[:2]])
    lines = ",\n".join("  " + json.dumps(each) for each in rows)
    RESULTS.write_text(f'{{\n "columns": {json.dumps(COLUMNS)},\n "rows": [\n{lines}\n ]\n}}\n')


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default="")
    parser.add_argument("--torch", default="")
    parser.add_argument("--short", action="store_true")
    chosen = parser.parse_args()
    pairs = [SHORT] if chosen.short else PAIRS
    pairs = [p for p in pairs if chosen.python in ("", p[0]) and chosen.torch in ("", p[1])]
    if not pairs and chosen.python and chosen.torch:
        pairs = [(chosen.python, chosen.torch)]
    failed = False
    for python, torch in pairs:
        try:
            row = row_of(python, torch, chosen.short)
        except NotHereError as error:
            print(f"Python {python} and torch {torch} are not tried: {error}", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"Python {python} and torch {torch}: {error}", flush=True)
            failed = True
        else:
            if not chosen.short:
                keep(row)
                # or a test of the next pair finds a page that lacks the row
                subprocess.run([sys.executable, "-m", "benchmarks.tables"], cwd=ROOT, check=True)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            failed |= row["failed"] > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
