"""Run the checks, each in a process of its own: `python -m tests.cuda [OUT] [--dry] [--only NAME]`.

Those that count bytes or compare values run several at a time, then those that measure time, one
after the other. Ends with 0 if no check failed, 1 if one did, and 2 if there is no CUDA device.
"""

import argparse
import contextlib
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .rig import CHECKS, Check, Rig, Skipped

_MODULES = (
    *("memory", "errors", "steps", "scopes", "profiles", "predictions"),
    *("paging", "graphs", "streams", "devices", "timings"),
)
_LIBRARIES = ("rich", "psutil", "numpy", "safetensors", "transformers", "triton", "pytest")
_TAIL = 4000
"""Characters of a failed check's output that the JSON holds."""


@dataclass
class Run:
    """The results of all checks, written after each: a run that is stopped has left what it had."""

    out: Path
    machine: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        print(_line(result))
        self.write()

    def write(self) -> None:
        found = self.machine | {
            "seconds": round(time.monotonic() - self.began_s, 1),
            "counts": {s: self.count(s) for s in ("PASS", "FAIL", "SKIP")},
            "checks": sorted(self.results, key=lambda each: [*CHECKS].index(each["name"])),
        }
        (self.out / "cuda.json").write_text(json.dumps(found, indent=1) + "\n")

    def count(self, state: str) -> int:
        return sum(result["state"] == state for result in self.results)


def main() -> int:
    given = _arguments()
    for name in _MODULES:
        importlib.import_module(f"tests.cuda.{name}")
    if given.list:
        print("\n".join(CHECKS))
        return 0
    if given.child:
        _work(CHECKS[given.child], Path(given.out), dry=given.dry)
        return 0
    if unknown := set(given.only) - set(CHECKS):
        raise SystemExit(f"There is no check {', '.join(unknown)}; --list names all.")
    out = Path(given.out or tempfile.mkdtemp(prefix="tenure-cuda-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [each for name, each in CHECKS.items() if not given.only or name in given.only]
    run = Run(out, _machine(dry=given.dry))
    has_device = given.dry or run.machine["device"] is not None
    if given.dry:
        _prepare_forks()
    if has_device:
        deadline_s = run.began_s + given.seconds
        n_workers = given.workers or max(
            1, min(8, (os.cpu_count() or 1) // (1 if given.dry else 2))
        )
        for alone in (False, True):
            group = [each for each in chosen if each.alone is alone]
            for result in _run_all(group, out, 1 if alone else n_workers, deadline_s, given):
                run.add(result)
    else:
        for each in chosen:
            run.add(_result(each, "SKIP", reason="no CUDA device"))
    run.write()
    _tell_failures(run)
    where = "the simulated device" if given.dry else run.machine["device"] or "no CUDA device"
    seconds = time.monotonic() - run.began_s
    print(
        f"{run.count('PASS')} passed, {run.count('FAIL')} failed, {run.count('SKIP')} skipped"
        f" on {where}, in {seconds:.0f} s. Wrote {out / 'cuda.json'}"
    )
    if not has_device:
        print(f"Nothing was verified: no CUDA device (this PyTorch is {torch.__version__})")
        return 2
    return 1 if run.count("FAIL") else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sh tests/cuda/run.sh", description=__doc__)
    parser.add_argument("out", nargs="?", help="the folder for cuda.json and the logs of failures")
    parser.add_argument("--dry", action="store_true", help="on the simulated device")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of all checks")
    parser.add_argument("--seconds", type=float, default=480, help="begin no check after so many")
    parser.add_argument("--workers", type=int, help="how many checks run at a time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the processes


@dataclass
class _Job:
    check: Check
    pid: int
    began_s: float
    result: Path
    log: Path


def _prepare_forks() -> None:
    """Do once what each check on the simulated device needs; they are forked from this process."""
    from tenure.testing import simulated_accelerator

    with simulated_accelerator():
        pass
    if importlib.util.find_spec("transformers"):
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")
        importlib.import_module("transformers.models.bert.modeling_bert")


def _run_all(
    checks: Iterable[Check], out: Path, n_workers: int, deadline_s: float, given: Any
) -> Iterator[dict[str, Any]]:
    """The result of each check, in the order in which they end."""
    waiting, running = deque(checks), list[_Job]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < n_workers:
                each = waiting.popleft()
                if given.dry and each.gpu_only:
                    yield _result(each, "SKIP", reason=f"can't be rehearsed: {each.gpu_only}")
                elif time.monotonic() > deadline_s:
                    yield _result(each, "SKIP", reason="no time was left")
                else:
                    running.append(_start(each, Path(folder), dry=given.dry))
            for job in [job for job in running if _has_ended(job)]:
                running.remove(job)
                yield _ended(job, out)
            time.sleep(0.01)


def _start(each: Check, folder: Path, *, dry: bool) -> _Job:
    job = _Job(each, 0, time.monotonic(), folder / f"{each.name}.json", folder / f"{each.name}.log")
    sys.stdout.flush()
    with warnings.catch_warnings():
        # of 3.12 on, for threads of libraries: this process has started none
        warnings.simplefilter("ignore", DeprecationWarning)
        job.pid = os.fork()
    if job.pid:
        return job
    status = 1
    try:
        with job.log.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.setpgid(0, 0)
        if dry:
            _work(each, job.result, dry=True)
        else:
            # anew, because CUDA may be in use in what this was forked from, and for its variables
            module = [sys.executable, "-m", "tests.cuda", str(job.result), "--child", each.name]
            os.execve(sys.executable, module, os.environ | each.environment)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _has_ended(job: _Job) -> bool:
    if os.waitpid(job.pid, os.WNOHANG) != (0, 0):
        return True
    if time.monotonic() > job.began_s + job.check.limit_s + 5:
        os.killpg(job.pid, signal.SIGKILL)
    return False


def _ended(job: _Job, out: Path) -> dict[str, Any]:
    log = job.log.read_text(errors="replace")
    if job.result.exists():
        found = json.loads(job.result.read_text())
    else:
        reason = f"it ended without a result, or took more than {job.check.limit_s:g} s"
        found = _result(job.check, "FAIL", reason=reason)
    found["seconds"] = round(time.monotonic() - job.began_s, 1)
    if found["state"] == "FAIL":
        (out / f"{job.check.name}.log").write_text(log)
        found["error"] = log[-_TAIL:]
    return found


def _work(each: Check, path: Path, *, dry: bool) -> None:
    """Run a check in this process and write its result."""
    faulthandler.dump_traceback_later(each.limit_s, exit=True)
    try:
        with _rig(each, dry=dry) as rig:
            result = _result(each, "PASS", figures=dict(each.run(rig)))
    except Skipped as reason:
        result = _result(each, "SKIP", reason=str(reason))
    except BaseException as error:
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        result = _result(each, "FAIL", reason=f"{type(error).__name__}: {first}")
    faulthandler.cancel_dump_traceback_later()
    path.write_text(json.dumps(result))


@contextlib.contextmanager
def _rig(each: Check, *, dry: bool) -> Iterator[Rig]:
    if not dry:
        yield Rig(torch.device("cuda", 0))
        return
    from tenure.testing import simulated_accelerator

    options: Any = {"allocator": "cuda", "devices": 2} | dict(each.sim)
    with simulated_accelerator(**options) as sim:
        yield Rig(sim.device, sim)


# --- what is printed and written


def _machine(*, dry: bool) -> dict[str, Any]:
    """The device and its driver, and the versions of torch, Python and libraries."""
    from tenure import __version__

    versions: dict[str, str] = {"tenure": __version__, "torch": str(torch.__version__)}
    versions["Python"] = platform.python_version()
    missing = []
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    found: dict[str, Any] = {"dry": dry, "device": None, "driver": None}
    if not dry and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "device_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "devices": torch.cuda.device_count(),
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    found |= {"cores": os.cpu_count(), "versions": versions, "missing": missing}
    device = "the simulated device" if dry else f"{found['device']}, driver {found['driver']}"
    print(f"{device}; {os.cpu_count()} cores")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"missing: {', '.join(missing) or 'nothing'}")
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


def _result(each: Check, state: str, **found: Any) -> dict[str, Any]:
    return {"name": each.name, "state": state, "seconds": 0.0} | found


def _line(result: dict[str, Any]) -> str:
    seen = result.get("reason") or " ".join(
        f"{name}={_short(value)}" for name, value in result.get("figures", {}).items()
    )
    return f"{result['state']}  {result['name']}  {result['seconds']:.1f} s  {seen}"[:230]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace(" ", "")


def _tell_failures(run: Run) -> None:
    failed = [result for result in run.results if result["state"] == "FAIL"]
    for result in failed[:8]:
        print(f"--- {result['name']}: the end of {run.out / result['name']}.log")
        print("\n".join(result["error"].splitlines()[-8:])[-900:])


if __name__ == "__main__":
    sys.exit(main())
