"""Processes that are killed while they page from a disk leave nothing, and harm no file."""

import hashlib
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import nn

from ..programs import run_program

_PROGRAM = """
import os, pathlib, signal, threading, time, torch
from torch import nn
from tenure.paging import load_paged, page

folder = pathlib.Path(os.environ["FOLDER"])
threading.Thread(
    target=lambda: (time.sleep(float(os.environ["AFTER_S"])), os.kill(os.getpid(), signal.SIGKILL)),
    daemon=True,
).start()
while True:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    with torch.no_grad():
        with load_paged(model, folder / "weights" / "model.safetensors", "cpu", budget="256KiB"):
            model(torch.ones(1, 128))
        own = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
        with page(own, "cpu", budget="256KiB", host=folder / "pages"):
            own(torch.ones(1, 128))
"""


def run(n_kills, seed=0):
    """Kill so many processes, each after another time; how many left a file or changed one."""
    chance = random.Random(seed)
    failures = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "weights").mkdir()
        (folder / "pages").mkdir()
        weights = folder / "weights" / "model.safetensors"
        save_file(nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]).state_dict(), weights)
        before = hashlib.sha256(weights.read_bytes()).digest()
        for _ in range(n_kills):
            after_s = chance.uniform(0.05, 0.6)
            done = run_program(_PROGRAM, FOLDER=str(folder), AFTER_S=str(after_s))
            assert done.returncode == -9, done.stderr
            found = sorted(p.name for p in folder.rglob("*") if p.is_file())
            if found != ["model.safetensors"]:
                failures.append(f"left {found}")
            if hashlib.sha256(weights.read_bytes()).digest() != before:
                failures.append("changed the weights")
    return failures
