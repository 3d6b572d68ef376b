"""Run the checks: `python -m tests.cuda [OUT] [--dry] [--only NAME]`.

On a GPU each runs in a process of its own: those that count bytes or compare values several at a
time, then those that measure time, one after the other. With `--dry` all run in this process, on
the simulated device. Ends with 0 if no check failed, 1 if one did, 2 if there is no CUDA device.
"""

import argparse
import contextlib
import faulthandler
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def main() -> int:
    given = _arguments()
    for name in _MODULES:
        importlib.import_module(f"tests.cuda.{name}")
    if given.list:
        print("\n".join(CHECKS))
        return 0
    if given.child:
        Path(given.out).write_text(json.dumps(_outcome(CHECKS[given.child], dry=False)))
        return 0
    if unknown := set(given.only) - set(CHECKS):
        raise SystemExit(f"There is no check {', '.join(unknown)}; --list names all.")
    out = Path(given.out or tempfile.mkdtemp(prefix="tenure-cuda-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    began_s, found, results = time.monotonic(), _machine(dry=given.dry), list[dict[str, Any]]()
    for result in _results(given, out, has_device=found["device"] is not None):
        results.append(result)
        print(_line(result))
        counts = {s: sum(r["state"] == s for r in results) for s in ("PASS", "FAIL", "SKIP")}
        found |= {"seconds": round(time.monotonic() - began_s, 1), "counts": counts}
        found["checks"] = sorted(results, key=lambda each: [*CHECKS].index(each["name"]))
        # after each: a run that is stopped has left what it had
        (out / "cuda.json").write_text(json.dumps(found, indent=1) + "\n")
    for result in [result for result in results if result["state"] == "FAIL"][:8]:
        print(f"--- {result['name']}: the end of {out / result['name']}.log")
        print("\n".join(result["error"].splitlines()[-8:])[-900:])
    where = "the simulated device" if given.dry else found["device"] or "no CUDA device"
    told = ", ".join(
        f"{counts[s]} {word}"
        for s, word in (("PASS", "passed"), ("FAIL", "failed"), ("SKIP", "skipped"))
    )
    print(f"{told} on {where}, in {found['seconds']:.0f} s. Wrote {out / 'cuda.json'}")
    if not given.dry and found["device"] is None:
        print(f"Nothing was verified: no CUDA device (this PyTorch is {torch.__version__})")
        return 2
    return 1 if counts["FAIL"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sh tests/cuda/run.sh", description=__doc__)
    parser.add_argument("out", nargs="?", help="the folder for cuda.json and the logs of failures")
    parser.add_argument("--dry", action="store_true", help="on the simulated device")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of all checks")
    parser.add_argument("--seconds", type=float, default=480, help="begin no check after so many")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _results(given: Any, out: Path, *, has_device: bool) -> Iterator[dict[str, Any]]:
    """The result of each chosen check; those that run beside one another in the order of all."""
    chosen = [each for name, each in CHECKS.items() if not given.only or name in given.only]
    deadline_s = time.monotonic() + given.seconds
    if not has_device and not given.dry:
        yield from (_result(each, "SKIP", reason="no CUDA device") for each in chosen)
        return
    run = partial(_rehearsed if given.dry else _in_a_process, out=out, deadline_s=deadline_s)
    n_workers = 1 if given.dry else max(1, min(8, (os.cpu_count() or 1) // 2))
    for alone, n_beside in ((False, n_workers), (True, 1)):
        group = [each for each in chosen if each.alone is alone]
        if n_beside == 1:
            yield from map(run, group)
            continue
        with ThreadPoolExecutor(n_beside) as pool:
            yield from pool.map(run, group)


def _rehearsed(each: Check, *, out: Path, deadline_s: float) -> dict[str, Any]:
    """Run a check in this process, on the simulated device."""
    if each.gpu_only:
        return _result(each, "SKIP", reason=f"can't be rehearsed: {each.gpu_only}")
    if time.monotonic() > deadline_s:
        return _result(each, "SKIP", reason="no time was left")
    result = _outcome(each, dry=True)
    if "error" in result:
        (out / f"{each.name}.log").write_text(result["error"])
    return result


def _in_a_process(each: Check, *, out: Path, deadline_s: float) -> dict[str, Any]:
    """Run a check on the GPU in a process of its own: an error of CUDA leaves none usable."""
    began_s = time.monotonic()
    if began_s > deadline_s:
        return _result(each, "SKIP", reason="no time was left")
    log, path = out / f"{each.name}.log", out / f"{each.name}.json"
    command = [sys.executable, "-m", "tests.cuda", str(path), "--child", each.name]
    with log.open("w") as file:
        options: Any = {"stdout": file, "stderr": file, "env": os.environ | each.environment}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=each.limit_s + 5, check=False, **options)
    reason = f"it ended without a result, or took more than {each.limit_s:g} s"
    result = _result(each, "FAIL", reason=reason)
    if path.exists():
        result = json.loads(path.read_text())
        path.unlink()
    result["seconds"] = round(time.monotonic() - began_s, 1)
    if result["state"] == "FAIL":
        result["error"] = log.read_text(errors="replace")[-_TAIL:]
    else:
        log.unlink()
    return result


@contextlib.contextmanager
def _rig(each: Check, *, dry: bool) -> Iterator[Rig]:
    if not dry:
        yield Rig(torch.device("cuda", 0))
        return
    from tenure.testing import simulated_accelerator

    options: Any = {"allocator": "cuda", "devices": 2} | dict(each.sim)
    with simulated_accelerator(**options) as sim:
        yield Rig(sim.device, sim)


def _outcome(each: Check, *, dry: bool) -> dict[str, Any]:
    """Run a check in this process."""
    began_s = time.monotonic()
    faulthandler.dump_traceback_later(each.limit_s, exit=True)
    try:
        with _rig(each, dry=dry) as rig:
            torch.manual_seed(0)
            result = _result(each, "PASS", figures=dict(each.run(rig)))
    except Skipped as reason:
        result = _result(each, "SKIP", reason=str(reason))
    except BaseException as error:
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        result = _result(each, "FAIL", reason=f"{type(error).__name__}: {first}")
        result["error"] = traceback.format_exc()[-_TAIL:]
    faulthandler.cancel_dump_traceback_later()
    result["seconds"] = round(time.monotonic() - began_s, 1)
    return result


def _machine(*, dry: bool) -> dict[str, Any]:
    """The device and its driver, and the versions of torch, Python and libraries."""
    from tenure import __version__

    versions: dict[str, str] = {"tenure": __version__, "torch": str(torch.__version__)}
    versions["Python"] = platform.python_version()
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    missing = [name for name in _LIBRARIES if name not in versions]
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
    figures = result.get("figures", {}).items()
    seen = " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}".replace(" ", "")
        for name, value in figures
    )
    seen = result.get("reason") or seen
    return f"{result['state']}  {result['name']}  {result['seconds']:.1f} s  {seen}"[:230]


if __name__ == "__main__":
    sys.exit(main())
