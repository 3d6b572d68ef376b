"""More planted programs: results that pile up, garbage, exceptions that are kept."""

from .planted import plant

# --- results


plant(
    "outputs",
    "results",
    ("outputs", "chunked"),
    """
def predict(net, batches):
    outputs = []
    with torch.no_grad():
        for _ in range(batches):
            outputs.append(net(torch.randn(64, 64)))
    return torch.cat(outputs)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 512)).eval()
predict(net, 10_000)
""",
)

plant(
    "outputs with their graphs",
    "results",
    ("predictions", "no_grad"),
    """
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
def evaluate():
    net.eval()
    predictions = []
    for _ in range(10_000):
        predictions.append(net(torch.randn(64, 64)))
    return torch.cat(predictions).argmax(-1)
evaluate()
""",
)

plant(
    "outputs by name",
    "results",
    ("outputs", "chunked"),
    """
def collect(net):
    outputs = {"hidden": [], "ids": []}
    with torch.inference_mode():
        for i in range(10_000):
            outputs["ids"].append(i)
            outputs["hidden"].append(net(torch.randn(32, 64)))
    return outputs
collect(nn.Linear(64, 1024))
""",
)

plant(
    "outputs on a device",
    "results",
    ("results", "chunked"),
    """
net = nn.Linear(64, 256).to(DEVICE)
results = []
with torch.no_grad():
    for _ in range(10_000):
        results.append(net(torch.randn(64, 64).to(DEVICE)).sigmoid())
""",
    place="sim",
    size="4MiB",
)


# --- garbage


plant(
    "a ring of objects",
    "cycle",
    ("cycle", "scope"),
    """
class Node:
    def __init__(self, x):
        self.x, self.self = x, self
def main():
    gc.disable()
    for _ in range(10_000):
        node = Node(torch.ones(64, 1024))
        node.total = node.x.sum()
main()
""",
)

plant(
    "a module whose hook refers to it",
    "cycle",
    ("cycle", "scope"),
    """
class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.layer.register_forward_hook(self.note)
    def note(self, module, args, out):
        self.norm = out.norm().item()
    def forward(self, x):
        return self.layer(x)
def search():
    gc.disable()
    for trial in range(1000):
        model = Probe()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
search()
""",
    size="8MiB",
)


# --- exceptions


plant(
    "errors in a list",
    "traceback",
    ("traceback", "str(error)"),
    """
def parse(i):
    batch = torch.ones(128, 1024) * i
    if batch.sum() >= 0:
        raise ValueError(f"sample {i} is broken")
def main():
    errors = []
    for i in range(1000):
        try:
            parse(i)
        except ValueError as error:
            errors.append(error)
main()
""",
    size="8MiB",
)

plant(
    "the last error",
    "traceback",
    ("traceback", "str(error)"),
    """
STATE = {}
def forward(n):
    hidden = torch.ones(n, 1024)
    again = hidden * 2
    raise RuntimeError("shapes differ")
def attempt(n):
    try:
        forward(n)
    except RuntimeError as error:
        STATE["last"] = error
attempt(1536)  # 12 MiB of 16
x = torch.randn(1400, 1024)
print(x.sum())
""",
)

plant(
    "a retry within the handler",
    "traceback",
    ("traceback", "str(error)"),
    """
def work(n):
    parts = torch.ones(n, 1024)
    more = parts + 1
    return (parts * more).sum()
def main():
    try:
        return work(2048)
    except RuntimeError:
        return work(1024)
main()
""",
    size="18MiB",
)

# Each addition in place saves a copy that has a graph of its own, and no name. The gradients of
# weight and bias hold the same graphs, and without one of them the other still holds all: each of
# the two names is right.
plant(
    "gradients with graphs",
    "leak",
    ("linear.", ".grad keeps", "set .grad to none"),
    """
def train(model):
    x = torch.randn(64, 128)
    for _ in range(10_000):
        model(x).square().mean().backward(create_graph=True)
train(nn.Linear(128, 512))
""",
)

plant(
    "callbacks for later",
    "leak",
    ("callbacks[…]", "detach()"),
    """
def train(model):
    callbacks = []
    for _ in range(10_000):
        out = model(torch.randn(256, 128))
        callbacks.append(lambda out=out: out.mean())
train(nn.Linear(128, 512))
""",
)

plant(
    "results of a cache",
    "leak",
    ("lru_cache of Clips.load keeps", "results", "Clips.load.cache_clear()"),
    """
import functools
class Clips:
    @functools.cache
    def load(self, number):
        return torch.randn(80, 200 + number)
def main():
    clips, net = Clips(), nn.Conv1d(80, 8, 3)
    for number in range(10_000):
        net(clips.load(number)[None]).mean().backward()
main()
""",
    size="8MiB",
)

plant(
    "a hook's mapping, which is returned",
    "leak",
    ("found[…][…] keeps", "bound it"),
    """
def watch(model):
    activations = {}
    def hook(module, args, output):
        activations.setdefault(module, []).append(output.detach())
    for module in model:
        module.register_forward_hook(hook)
    return activations
def main():
    net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 3))
    found = watch(net)
    while True:
        net(torch.randn(64, 32)).square().mean().backward()
main()
""",
    size="8MiB",
)

plant(
    "a data set, and too large a batch",
    "batch",
    ("batch", "step("),
    """
class Data:
    def __init__(self, items):
        self.items = items
def load(n):
    found = []
    for _ in range(n):
        found.append(torch.randn(16, 64))
    return found
def main():
    samples = load(1000)
    data = Data(samples)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
    net(torch.cat(data.items)).mean().backward()
main()
""",
)

plant(
    "models that are tried under one autocast",
    "leak",
    ("autocast", "cache_enabled=False"),
    """
def build():
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 4))
def main():
    x, best = torch.randn(16, 128), 0.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(200):
            best = max(best, build()(x).float().max().item())
main()
""",
)

plant(
    "results of tasks",
    "leak",
    ("leak: tasks[…]", "bound it"),
    """
import asyncio
async def score():
    await asyncio.sleep(0)
    return torch.randn(64, 512).softmax(-1)
async def serve():
    tasks = set()
    while True:
        task = asyncio.create_task(score())
        tasks.add(task)
        await task
asyncio.run(serve())
""",
    size="8MiB",
)

plant(
    "states that know their parents",
    "leak",
    (".parent.….hidden keeps", "set .parent to none"),
    """
class Beam:
    def __init__(self, hidden, parent=None):
        self.hidden, self.parent = hidden, parent
@torch.no_grad()
def search():
    cell, beams = nn.GRUCell(64, 256), [Beam(torch.zeros(16, 256))]
    while True:
        beams = [Beam(cell(torch.randn(16, 64), beam.hidden), beam) for beam in beams[:4]] * 2
search()
""",
    size="8MiB",
)

plant(
    "maps of attention in a list of each block",
    "leak",
    ("maps[…] keeps", "bound it"),
    """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.maps = nn.Linear(32, 96), []
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        attention = (q @ k.mT).softmax(-1)
        self.maps.append(attention.detach())
        return attention @ v
def main():
    net = nn.Sequential(Block(), Block())
    while True:
        net(torch.randn(4, 96, 32)).square().mean().backward()
main()
""",
    size="8MiB",
)

plant(
    "a queue that is filled before it is read",
    "leak",
    ("batches.queue[…] keeps", "bound it"),
    """
import queue
def main():
    batches = queue.Queue()
    for _ in range(5000):
        batches.put(torch.randn(64, 512))
main()
""",
    size="8MiB",
)

plant(
    "a data set in one tensor",
    "batch",
    ("images alone takes", "in parts"),
    """
def main():
    images = torch.randn(900, 3, 36, 36)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36 * 36, 128), nn.ReLU(), nn.Linear(128, 10))
    adam = torch.optim.Adam(net.parameters())
    for batch in images.split(32):
        net(batch).square().mean().backward()
        adam.step()
main()
""",
)

plant(
    "a loss of all micro-batches",
    "leak",
    ("losses", "backward() on each"),
    """
def main():
    net = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    losses = 0.0
    for _ in range(512):
        x = torch.randn(32, 128)
        losses = losses + (net(x) - x).square().mean() / 512
    losses.backward()
main()
""",
)

plant(
    "arguments of callbacks",
    "leak",
    ("callbacks[…] keeps", "bound it"),
    """
import functools
def report(batch):
    return batch.mean()
def main():
    net, callbacks = nn.Linear(256, 16), []
    for _ in range(10_000):
        batch = torch.randn(64, 256)
        net(batch).square().mean().backward()
        callbacks.append(functools.partial(report, batch))
main()
""",
    size="8MiB",
)

plant(
    "a recurrent layer in an evaluation that trains nothing",
    "leak",
    ("state[…] carries", "detach()"),
    """
def main():
    lstm, state, sums = nn.LSTM(32, 128, batch_first=True), None, []
    for _ in range(2000):
        out, state = lstm(torch.randn(8, 16, 32), state)
        sums.append(out.sum().item())
main()
""",
    size="8MiB",
)
