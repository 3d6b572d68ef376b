"""Programs that run out of memory, each with the cause that it has; `run` explains them.

Each is a script of its own in a process of its own, with a budget of the CPU, a simulated device or
a limit of the process. The recorder is told nothing of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from tests.programs import run_program

_HEAD = """
import atexit, gc, json, sys, torch
from torch import nn
from torch.nn import functional as F
from tenure.profiler import record_oom
torch.manual_seed(0)
recorder = record_oom(quiet=True)
atexit.register(lambda: print("REPORT", json.dumps(recorder.report and recorder.report.to_dict())))
"""
_PLACES = {
    "budget": """
from tenure.adaptive import memory_budget
_budget = memory_budget("{size}")
_budget.__enter__()
DEVICE = "cpu"
""",
    "sim": """
from tenure.testing import simulated_accelerator
_block = simulated_accelerator(budget="{size}", detect_races=False)
sim = _block.__enter__()
DEVICE = sim.device
""",
    "sim-cuda": """
from tenure.testing import simulated_accelerator
_block = simulated_accelerator(budget="{size}", allocator="cuda", detect_races=False)
sim = _block.__enter__()
DEVICE = sim.device
""",
    "process": """
import os, psutil, resource
_used = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) * 1024
_limit = _used + {n_bytes}
resource.setrlimit(resource.RLIMIT_DATA, (_limit, _limit))
DEVICE = "cpu"
""",
}


@dataclass(frozen=True)
class Planted:
    """One program.

    Attributes:
        name: of the program.
        cause: what is right.
        says: words of the first line, each of which it must have: the variable and the remedy.
        place: where it runs.
        size: how much memory there is.
        code: the program.
        imported: what its process is forked with.
    """

    name: str
    cause: str
    says: tuple[str, ...]
    place: str
    size: str
    code: str
    imported: tuple[str, ...] = ()


PLANTED: list[Planted] = []


def plant(name, cause, says, code, *, place="budget", size="16MiB", imported=(), into=PLANTED):
    into.append(Planted(name, cause, says, place, size, dedent(code), imported))


def run(planted, *, hides=True):
    """The report of a program, as data, and what it printed; None where memory did not run out."""
    n_bytes = int(planted.size.removesuffix("MiB")) << 20
    place = _PLACES[planted.place].format(size=planted.size, n_bytes=n_bytes)
    # the compiler, which torch's own code asks for under any mode, takes longer than the program
    imported = ("torch._dynamo", *planted.imported)
    with TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(_HEAD + place + planted.code)
        done = run_program(path, imported=imported, hides=hides, OMP_NUM_THREADS="1")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    return json.loads(line.removeprefix("REPORT ")), done


def failure_of(planted, report):
    """What is wrong with an explanation; None where it is right."""
    if report is None:
        return f"{planted.name}: no report"
    first = report["first_line"]
    missing = [word for word in planted.says if word.lower() not in first.lower()]
    if report["cause"] == planted.cause and not missing:
        return None
    return f"{planted.name}: {planted.cause} is explained as {report['cause']}: {first}"


# --- what is kept


plant(
    "losses",
    "leak",
    ("losses", "item()"),
    """
def train(steps):
    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    losses = []
    for _ in range(steps):
        x, y = torch.randn(64, 128), torch.randint(10, (64,))
        losses.append(F.cross_entropy(net(x), y))
    return sum(losses)
train(10_000)
""",
)

plant(
    "total",
    "leak",
    ("total", "item()"),
    """
layers = [nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 1)]
net = nn.Sequential(*layers).eval()
def validate():
    total = 0
    for _ in range(10_000):
        x = torch.randn(64, 128)
        total = total + F.mse_loss(net(x), torch.zeros(64, 1))
    return total / 10_000
validate()
""",
)

plant(
    "cache of a module",
    "leak",
    ("_FEATURES", "bound"),
    """
_FEATURES = {}
encoder = nn.Linear(64, 1024)
def features(step, x):
    if step not in _FEATURES:
        with torch.no_grad():
            _FEATURES[step] = encoder(x).relu()
    return _FEATURES[step]
def main():
    head = nn.Linear(1024, 2)
    for step in range(10_000):
        loss = head(features(step, torch.randn(64, 64))).square().mean()
        loss.backward()
main()
""",
)

plant(
    "attribute of a trainer",
    "leak",
    ("seen", "bound"),
    """
class Trainer:
    def __init__(self):
        self.model = nn.Linear(256, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen = []
    def step(self, x):
        out = self.model(x)
        loss = out.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen.append(out.detach())
        return loss.item()
trainer = Trainer()
print(sum(trainer.step(torch.randn(128, 256)) for _ in range(10_000)))
""",
)

plant(
    "a hook's list",
    "leak",
    ("activations", "bound"),
    """
def watch(layer):
    activations = []
    def hook(module, args, out):
        activations.append(out.detach().clone())
    layer.register_forward_hook(hook)
def main():
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
    watch(net[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(10_000):
        loss = net(torch.randn(64, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
)

plant(
    "a leak beside a big batch",
    "leak",
    ("kept", "item()"),
    """
def main():
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    kept = []
    for _ in range(1000):
        out = net(torch.randn(1024, 128))  # 4 MiB of 16
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        kept.append(loss)
main()
""",
)

plant(
    "a leak that the optimizer's step meets",
    "leak",
    ("history", "item()"),
    """
def main():
    net = nn.Linear(512, 512)
    optimizer = torch.optim.Adam(net.parameters())
    history = []
    while True:
        loss = net(torch.randn(32, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        history.append(loss)
main()
""",
)

plant(
    "losses on a device",
    "leak",
    ("losses", "item()"),
    """
class Run:
    pass
def train(run):
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(DEVICE)
    run.losses = []
    for _ in range(10_000):
        x = torch.randn(128, 64).to(DEVICE)
        loss = net(x).square().mean()
        run.losses.append(loss)
train(Run())
""",
    place="sim",
    size="8MiB",
)

plant(
    "tensors under a limit of the process",
    "leak",
    ("_memo", "bound"),
    """
_memo = {}
def main():
    for key in range(100_000):
        _memo[key, "x"] = torch.ones(256, 1024)
main()
""",
    place="process",
    size="220MiB",
)
