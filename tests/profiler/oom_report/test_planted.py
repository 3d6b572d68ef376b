"""Programs that run out of memory: the first line names the cause and the remedy.

Each names the culprit as well: a variable, a module, or a line. Each is a script of its own in a
process of its own, with a budget of the CPU, a simulated device or a limit of the process. The
recorder is told nothing of them.
"""

import json

import pytest
from torch.nn import functional as F

from tests.programs import IMPORTED, run_program

_MOST_CHARACTERS = 160
_QUICK = ("losses", "outputs on a device", "tensors under a limit of the process")
# torch has this loss since 2.13
_LOSS = "LinearCrossEntropyOptions" if hasattr(F, "linear_cross_entropy") else "step()"
_HEAD = """
import atexit, copy, functools, gc, itertools, json, sys, torch
from collections import deque
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tenure.profiler import record_oom
def mlp(*sizes):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.manual_seed(0)
recorder = record_oom(quiet=True)
atexit.register(lambda: print("REPORT", json.dumps(recorder.report and recorder.report.to_dict())))
"""
_ON_A_DEVICE = """
from tenure.testing import simulated_accelerator
_block = simulated_accelerator(budget="{size}", allocator="{allocator}", detect_races=False)
sim = _block.__enter__()
DEVICE = sim.device
"""
_PLACES = {
    "budget": """
from tenure.adaptive import memory_budget
_budget = memory_budget("{size}")
_budget.__enter__()
""",
    "sim": _ON_A_DEVICE.replace("{allocator}", "exact"),
    "sim-cuda": _ON_A_DEVICE.replace("{allocator}", "cuda"),
    "process": """
import resource
_used = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) * 1024
_limit = _used + (int("{size}".removesuffix("MiB")) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (_limit, _limit))
""",
}
# name | cause | words of the first line, each of which it must have | memory, and where
_PROGRAMS = r"""
=== losses | leak | losses; item() | 8MiB
def train(steps):
    net = mlp(128, 256, 10)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(64, 128), torch.randint(10, (64,))
        losses.append(F.cross_entropy(net(x), y))
    return sum(losses)
train(10_000)
=== a running loss | leak | running_loss += loss.item() | 8MiB
def main():
    net = mlp(128, 256, 10)
    running_loss = 0.0
    for step in range(2000):
        loss = F.cross_entropy(net(torch.randn(64, 128)), torch.randint(10, (64,)))
        running_loss += loss
=== a log that two lines fill | leak | keeps; graphs; keep .item() of each | 8MiB
def main():
    net, log, mode = mlp(128, 256, 10), {}, "mean"
    for step in range(2000):
        out = net(torch.randn(64, 128))
        if mode == "out":
            log[step] = out
        else:
            log[step] = {"mean": out.mean()}
=== tensors under a limit of the process | leak | _memo; bound | 220MiB process
_memo = {}
def main():
    for key in range(100_000):
        _memo[key, "x"] = torch.ones(256, 1024)
=== an lru_cache | leak | lru_cache of Clips.load keeps; results; Clips.load.cache_clear() | 8MiB
class Clips:
    @functools.cache
    def load(self, number):
        return torch.randn(80, 200 + number)
def main():
    clips, net = Clips(), nn.Conv1d(80, 8, 3)
    for number in range(10_000):
        net(clips.load(number)[None]).mean().backward()
=== a default argument | leak | store[…] keeps; store=None | 4MiB
def collect(x, store=[]):
    store.append(x)
    return torch.stack(store[-3:]).mean(0)
@torch.no_grad()
def main():
    net = nn.Linear(64, 64)
    for i in range(5000):
        collect(net(torch.randn(64, 64)))
=== keys and values while text is generated | leak | past; cat; bound | 6MiB
class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
    def forward(self, x, past):
        q, k, v = self.qkv(x).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        return F.scaled_dot_product_attention(q, k, v), (k, v)
@torch.no_grad()
def generate(layers, n):
    x, past = torch.randn(32, 1, 128), [None] * len(layers)
    for _ in range(n):
        for i, layer in enumerate(layers):
            x, past[i] = layer(x, past[i])
generate(nn.ModuleList(Attention(128) for _ in range(2)).eval(), 5000)
=== a filter that learns online | leak | belief; detach() | 4MiB
class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.correct = nn.Linear(96, 64)
    def forward(self, belief, observation):
        return torch.tanh(self.correct(torch.cat([belief, observation], -1)))
def main():
    model, belief = Filter(), torch.zeros(512, 64)
    for _ in range(10_000):
        belief = model(belief, torch.randn(512, 32))
        (belief - 1).square().mean().backward(retain_graph=True)
=== the best models so far | leak | snapshots; models; disk | 8MiB
def main():
    model = mlp(256, 256, 256)
    optimizer = sgd(model)
    snapshots = []
    for epoch in range(1000):
        for _ in range(2):
            update(optimizer, model(torch.randn(16, 256)).square().mean())
        snapshots.append(copy.deepcopy(model))
=== models that are tried under one autocast | leak | autocast; cache_enabled=False | 16MiB
def build():
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 4))
def main():
    x, best = torch.randn(16, 128), 0.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(200):
            best = max(best, build()(x).float().max().item())
=== crops of large images | leak | crops; .clone() | 8MiB
def collect(n):
    crops = []
    for i in range(n):
        image = torch.rand(3, 200, 200)
        y, x = torch.randint(0, 150, (2,)).tolist()
        crops.append(image[:, y : y + 32, x : x + 32])
    return crops
net = nn.Conv2d(3, 8, 3)
for crop in collect(1000):
    net(crop[None])
=== a ring of objects | cycle | cycle; scope | 16MiB
class Node:
    def __init__(self, x):
        self.x, self.self = x, self
def main():
    gc.disable()
    for _ in range(10_000):
        node = Node(torch.ones(64, 1024))
        node.total = node.x.sum()
=== a replay buffer that is never full | leak | buffer.memory[…]; lower its maxlen= | 4MiB
class ReplayBuffer:
    def __init__(self, capacity=100_000):
        self.memory = deque(maxlen=capacity)
def main():
    buffer = ReplayBuffer()
    for step in range(5000):
        buffer.memory.append((torch.rand(64, 64), 1.0))
=== a loss of all micro-batches | leak | losses; backward() on each | 8MiB
def main():
    net = mlp(128, 512, 128)
    losses = 0.0
    for _ in range(512):
        losses = losses + net(torch.randn(32, 128)).square().mean() / 512
    losses.backward()
=== a list that is being made of batches | leak | container at train.py:; one at a time | 4MiB
class Images(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, i):
        return torch.randn(3, 24, 24), i % 10
def main():
    batches = list(DataLoader(Images(), batch_size=32))
=== a loader for ever | leak | batches; itertools.cycle; while True | 6MiB
def main():
    net = nn.Linear(3072, 10)
    optimizer = sgd(net)
    images = torch.zeros(1, 3072).expand(4096, -1)
    batches = itertools.cycle(DataLoader(TensorDataset(images), batch_size=16, shuffle=True))
    for step in range(10_000):
        (x,) = next(batches)
        update(optimizer, net(x + step).square().mean())
=== outputs on a device | results | results; chunked | 2MiB sim
net = nn.Linear(64, 256).to(DEVICE)
results = []
with torch.no_grad():
    for _ in range(10_000):
        results.append(net(torch.randn(64, 64).to(DEVICE)).sigmoid())
=== a comprehension of predictions | results | container at train.py:; no_grad() | 4MiB
def predict(net, x, n):
    return torch.stack([net(x) for _ in range(n)]).mean(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
predict(net, torch.randn(128, 64), 200)
=== tasks of meta-learning | cycle | cycle; train.py:; .grad = None | 4MiB
def adapt(x, y):
    net = mlp(64, 128, 64)
    for _ in range(2):
        loss = F.mse_loss(net(x), y)
        loss.backward(create_graph=True)
    return loss.item()
def main():
    for task in range(10_000):
        adapt(torch.randn(32, 64), torch.randn(32, 64))
=== a retry within the handler | traceback | traceback; str(error) | 18MiB
def work(n):
    parts = torch.ones(n, 1024)
    more = parts + 1
    return (parts * more).sum()
def main():
    try:
        return work(2048)
    except RuntimeError:
        return work(1024)
=== a stage that is over | gradients | encoder keeps; zero_grad(set_to_none=True) | 46MiB
def pretrain(encoder):
    optimizer = torch.optim.SGD(encoder.parameters(), 1e-3)
    for _ in range(3):
        update(optimizer, encoder(torch.randn(32, 512)).square().mean())
def finetune(encoder):
    encoder.requires_grad_(False).eval()
    head = mlp(64, 1024, 1024, 9)
    adam = torch.optim.Adam(head.parameters())
    for _ in range(20):
        with torch.no_grad():
            z = encoder(torch.randn(256, 512))
        update(adam, head(z).square().mean())
encoder = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 1024), nn.Linear(1024, 64))
pretrain(encoder)
finetune(encoder)
=== a batch beside a list of numbers | batch | batch; step( | 16MiB
def main():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)))
    optimizer = sgd(net)
    losses, norms = [], []
    for size in (64, 64, 64, 64, 64, 4096):  # the last is of another data set
        loss = net(torch.randn(size, 128)).square().mean()
        update(optimizer, loss)
        losses.append(loss.item())
        norms.append(loss.detach())
=== a data set in one tensor | batch | images alone takes; in parts | 16MiB
def main():
    images = torch.randn(900, 3, 36, 36)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36 * 36, 128), nn.ReLU(), nn.Linear(128, 10))
    adam = torch.optim.Adam(net.parameters())
    for batch in images.split(32):
        net(batch).square().mean().backward()
        adam.step()
=== images in evaluation | batch | batch; chunked | 24MiB
net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
net.eval()
images = torch.randn(64, 3, 64, 64)
with torch.no_grad():
    net(images)
=== attention over one text | batch | shorten its input | 16MiB
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
    def forward(self, x):
        q, k, v = self.qkv(x).view(1, -1, 4, 48).transpose(1, 2).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v
Attention()(torch.randn(1, 1024, 64)).sum().backward()
=== a teacher that records | batch | no optimizer steps the Sequential; torch.no_grad() | 8MiB
def main():
    teacher, student = mlp(*[128] * 13), nn.Linear(128, 128)
    optimizer = sgd(student)
    for _ in range(10):
        x = torch.randn(1500, 128)
        target = teacher(x)
        update(optimizer, F.mse_loss(student(x), target))
=== 2 shapes | batch | [4096, 1] and [4096] broadcast to [4096, 4096]; squeeze(); train.py: | 32MiB
def main():
    net = nn.Linear(16, 1)
    x = torch.randn(4096, 16)
    loss = (net(x) - x.sum(1)).abs().mean()
    loss.backward()
=== a long sequence | batch | batch; state is never cut; train.py:; detach() | 6MiB
def main():
    cell, head = nn.LSTMCell(32, 64), nn.Linear(64, 4)
    x = torch.randn(200, 32, 32)
    h = c = torch.zeros(32, 64)
    for step in x:
        h, c = cell(step, (h, c))
    head(h).square().mean().backward()
=== logits that are cut before their loss | logits | lm.wte for 16000 classes; {loss} | 96MiB
class LM(nn.Module):
    def __init__(self, vocab=16_000, d=32):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
    def forward(self, ids):
        logits = self.lm_head(self.rnn(self.wte(ids))[0])
        cut = logits[:, :-1].reshape(-1, logits.size(-1))
        return F.cross_entropy(cut, ids[:, 1:].reshape(-1))
LM()(torch.randint(16_000, (8, 128))).backward()
=== the history of LBFGS | optimizer_state | LBFGS; history_size | 12MiB
def main():
    net = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5)
    x = torch.randn(64, 128)
    y = x.sin() * x.flip(1)
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss
    for _ in range(50):
        optimizer.step(closure)
=== the first step of AdamW | optimizer_state | AdamW; first step | 20MiB
def main():
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(3):
        update(optimizer, net(torch.randn(8, 512)).square().mean())
=== a model too large for the device | weights | weights; page( | 16MiB sim
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40)))
model.to(DEVICE)
=== a checkpoint that is loaded to the device | weights | copies; map_location="cpu" | 6MiB sim
model = mlp(512, 512, 512, 512).to(DEVICE)
torch.save(model.state_dict(), "big.pt")
try:
    torch.load("big.pt", map_location=DEVICE)
except torch.OutOfMemoryError:
    pass
=== a copy of all weights | weights | copies; .cpu() | 6MiB sim
model = mlp(512, 512, 512, 512).to(DEVICE)
best = {name: t.clone() for name, t in model.state_dict().items()}
=== lengths that differ | fragmentation | fragmentation; expandable_segments | 100MiB sim-cuda
parts = [torch.empty(9 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(10)]
kept = parts[::2]
del parts
whole = torch.empty(15 << 20, dtype=torch.uint8, device=DEVICE)
=== a list in blocks with a little unused | leak | kept[…] keeps; bound it | 96MiB sim-cuda
kept = []
def main():
    while True:
        kept.append(torch.empty(19 << 19, dtype=torch.uint8, device=DEVICE))
=== another process | other_process | another process | 16MiB
def allocate():
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB "
        "of which 1.12 GiB is free. Process 4242 has 21.00 GiB memory in use. Including "
        "non-PyTorch memory, this process has 1.56 GiB memory in use. Of the allocated memory "
        "1.20 GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
    )
class Layer(nn.Module):
    def forward(self, x):
        return allocate()
Layer()(torch.ones(3))
=== arrays of NumPy | host | host; numpy | 250MiB process
import numpy
arrays = []
while True:
    arrays.append(numpy.ones((1024, 1024)))
    torch.ones(1024, 256)
"""
PLANTED = [each.partition("\n") for each in _PROGRAMS.strip().removeprefix("=== ").split("\n=== ")]


def _case(header, _, code):
    name, *facts = header.split(" | ")
    marks = () if name in _QUICK else (pytest.mark.slow,)
    return pytest.param(name, *facts, code, id=name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize(
    ("name", "cause", "says", "where", "code"), [_case(*one) for one in PLANTED]
)
def test_the_cause_of_a_planted_error_is_told(
    name, cause, says, where, code, tmp_path, monkeypatch
):
    size, _, place = where.partition(" ")
    path = tmp_path / "train.py"
    monkeypatch.chdir(tmp_path)
    path.write_text(
        _HEAD
        + _PLACES[place or "budget"].format(size=size)
        + code
        + ("\nmain()\n" if "def main():" in code else "\n")
    )
    # the compiler, which torch's own code asks for under any mode, takes longer than a program
    done = run_program(path, imported=IMPORTED, hides=True, OMP_NUM_THREADS="1")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    report = json.loads(line.removeprefix("REPORT "))
    assert report, done.stderr[-1500:]
    first = report["first_line"]
    assert report["cause"] == cause, first
    for word in says.replace("{loss}", _LOSS).split("; "):
        assert word.lower() in first.lower()
    assert len(first) <= _MOST_CHARACTERS
    # the variables of what ran are named as before the error
    holders = [each["name"] for each in report["holders"]]
    assert cause == "traceback" or not any("traceback of" in each for each in holders)


def test_each_cause_is_planted():
    assert len(PLANTED) >= 30
    assert len({header.split(" | ")[1] for header, *_ in PLANTED}) == 12
