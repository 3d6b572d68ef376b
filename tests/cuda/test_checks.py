"""The checks by pytest: all on the simulated device, each on a GPU where there is one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.programs import IMPORTED, run_program

_RUN = Path(__file__).with_name("run.sh")
_COMMAND = "-m", "tests.cuda"


def _run(out, python=sys.executable):
    environment = {"PYTHON": str(python), "PATH": "/usr/bin:/bin"}
    command = ["sh", str(_RUN), str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _found(out):
    return json.loads((out / "cuda.json").read_text())


@pytest.mark.slow
def test_all_checks_pass_on_the_simulated_device(tmp_path, monkeypatch):
    monkeypatch.chdir(_RUN.parents[2])
    done = run_program(*_COMMAND, str(tmp_path), "--dry", imported=IMPORTED, hides=True)
    assert done.returncode == 0, done.stdout[-4000:]
    found = _found(tmp_path)
    assert found["dry"]
    assert found["device"] is None
    assert found["counts"]["FAIL"] == 0
    assert sum(found["counts"].values()) == len(found["checks"])
    assert found["counts"]["PASS"] > 40
    skipped = [each for each in found["checks"] if each["state"] == "SKIP"]
    assert all(each["reason"].startswith("can't be rehearsed: ") for each in skipped)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_run_without_a_gpu_says_that_nothing_was_verified(tmp_path, monkeypatch):
    monkeypatch.chdir(_RUN.parents[2])
    done = run_program(*_COMMAND, str(tmp_path), imported=IMPORTED)
    assert done.returncode == 2
    assert "Nothing was verified: no CUDA device (this PyTorch is 2." in done.stdout
    assert set(_found(tmp_path)["counts"].items()) >= {("PASS", 0), ("FAIL", 0)}


def test_a_python_without_torch_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    python.chmod(0o755)
    done = _run(tmp_path, python)
    assert done.returncode == 2
    assert f"{python} has no torch. Set PYTHON to an interpreter that has it." in done.stderr


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_checks_pass_on_a_gpu(tmp_path):
    done = _run(tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert _found(tmp_path)["counts"]["PASS"] > 30
