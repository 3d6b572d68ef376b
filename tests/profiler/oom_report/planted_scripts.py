"""Scripts as people write them, each with one planted cause, and its culprit and remedy."""

from .planted import plant

SCRIPTS = []


def script(name, cause, says, code, size="16MiB", **options):
    plant(name, cause, says, code, size=size, into=SCRIPTS, **options)


# --- gradients that nobody clears

script(
    "experts trained in turn",
    "gradients",
    ("gradients", "experts", "zero_grad(set_to_none=True)"),
    """
def fit(expert, data):
    optimizer = torch.optim.SGD(expert.parameters(), lr=0.01)
    for x in data:
        optimizer.zero_grad()
        expert(x).square().mean().backward()
        optimizer.step()
def main():
    def expert():
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    experts = {domain: expert() for domain in "abcdefgh"}
    for domain, expert in experts.items():
        fit(expert, [torch.randn(32, 256) for _ in range(4)])
main()
""",
    "13MiB",
)

script(
    "phases of one training",
    "gradients",
    ("gradients", "encoder", "set_to_none=True"),
    """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.out = nn.Linear(784, 512), nn.Linear(512, 512)
    def forward(self, x):
        return self.out(self.proj(x).relu())
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(512, 784)
    def forward(self, z):
        return self.up(z)
def train():
    encoder, decoder = Encoder(), Decoder()
    opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        encoder(torch.randn(16, 784)).var().backward()
        opt.step()
    encoder.requires_grad_(False)
    opt = torch.optim.SGD(decoder.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(256, 784)
        loss = F.mse_loss(decoder(encoder(x)), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
train()
""",
    "9MiB",
)

# --- caches that grow by cat

script(
    "keys and values while text is generated",
    "leak",
    ("past", "cat", "bound"),
    """
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
    x, past = torch.randn(16, 1, 128), [None] * len(layers)
    for _ in range(n):
        for i, layer in enumerate(layers):
            x, past[i] = layer(x, past[i])
generate(nn.ModuleList(Attention(128) for _ in range(4)).eval(), 5000)
""",
    "12MiB",
)

script(
    "a cache in an attribute",
    "leak",
    ("k_cache", "cat", "bound"),
    """
class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_cache = None
    def forward(self, x):
        q, k = self.to_q(x), self.to_k(x)
        self.k_cache = k if self.k_cache is None else torch.cat((self.k_cache, k), dim=1)
        return (q @ self.k_cache.transpose(1, 2)).softmax(-1) @ self.k_cache
model = SelfAttention(256).eval()
with torch.inference_mode():
    token = torch.randn(8, 1, 256)
    for step in range(10_000):
        token = model(token)
""",
    "8MiB",
)

script(
    "a bank that is a buffer",
    "leak",
    ("bank", "cat", "bound"),
    """
class MemoryBank(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.register_buffer("bank", torch.empty(0, 64))
    def forward(self, x):
        z = F.normalize(self.backbone(x), dim=-1)
        self.bank = torch.cat([self.bank, z.detach()])
        return (z @ self.bank.T[:, :64]).logsumexp(-1).mean()
def main():
    model = MemoryBank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10_000):
        loss = model(torch.randn(128, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
    "6MiB",
)

script(
    "features joined as they come",
    "leak",
    ("features", "cat"),
    """
def extract(backbone, loader):
    features = torch.empty(0, 512)
    with torch.no_grad():
        for images in loader:
            out = backbone(images)
            features = torch.cat((features, out))
    return features
backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 512)).eval()
extract(backbone, (torch.randn(32, 3, 8, 8) for _ in range(10_000)))
""",
    "8MiB",
)

# --- graphs that go on from step to step

script(
    "a sum that is trained on",
    "leak",
    ("total_loss", "retain_graph"),
    """
def train(model, optimizer):
    total_loss = 0
    for i in range(10_000):
        x, y = torch.randn(64, 128), torch.randn(64, 1)
        total_loss = total_loss + F.mse_loss(model(x), y)
        total_loss.backward(retain_graph=True)
        if i % 500 == 499:
            optimizer.step()
            optimizer.zero_grad()
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
train(model, torch.optim.SGD(model.parameters(), lr=0.0))
""",
)

script(
    "the graph of the last step",
    "leak",
    ("previous", "loss", "retain_graph"),
    """
def stylize(net, target):
    image = torch.randn(512, 256, requires_grad=True)
    optimizer = torch.optim.SGD([image], lr=0.1)
    for i in range(100):
        optimizer.zero_grad()
        loss = F.mse_loss(net(image), target)
        loss.backward(retain_graph=True)
        optimizer.step()
        if i % 10 == 0:
            print(loss.item())
layers = (nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
net = nn.Sequential(*layers).requires_grad_(False)
stylize(net, torch.randn(512, 256))
""",
    "11MiB",
)

script(
    "a hidden state",
    "leak",
    ("hidden", "detach()"),
    """
class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.fc = nn.Embedding(100, 64), nn.GRU(64, 128), nn.Linear(128, 100)
    def forward(self, tokens, hidden):
        out, hidden = self.rnn(self.embed(tokens), hidden)
        return self.fc(out), hidden
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hidden = torch.zeros(1, 16, 128)
    for i in range(10_000):
        tokens = torch.randint(100, (17, 16))
        logits, hidden = model(tokens[:-1], hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        loss.backward(retain_graph=True)
        if i % 100 == 99:  # gradients of many texts together
            optimizer.step()
            optimizer.zero_grad()
train(CharRNN())
""",
)

script(
    "a stream's memory",
    "leak",
    ("memory", "detach()"),
    """
class Streamer:
    def __init__(self):
        self.cell = nn.GRUCell(80, 256).eval()
        self.head = nn.Linear(256, 40)
        self.memory = torch.zeros(8, 256)
    def feed(self, frame):
        self.memory = self.cell(frame, self.memory)
        return self.head(self.memory).argmax(-1).tolist()
streamer = Streamer()
for _ in range(100_000):
    streamer.feed(torch.randn(8, 80))
""",
)

script(
    "a baseline of rewards",
    "leak",
    ("baseline", "detach()"),
    """
layers = [nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)]
policy = nn.Sequential(*layers)
optimizer = torch.optim.Adam(policy.parameters())
def run():
    baseline = torch.zeros(())
    for episode in range(10_000):
        value = policy(torch.randn(64, 64)).logsumexp(-1).mean()
        baseline = 0.9 * baseline + 0.1 * value
        advantage = (value - baseline).item()
        print(advantage)
run()
""",
)

# --- copies of models

script(
    "the best models so far",
    "leak",
    ("snapshots", "models", "disk"),
    """
import copy
def main():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = []
    for epoch in range(1000):
        for _ in range(2):
            loss = model(torch.randn(16, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        snapshots.append(copy.deepcopy(model))
main()
""",
    "8MiB",
)

script(
    "weights of each epoch",
    "leak",
    ("checkpoints", "weights", "disk"),
    """
checkpoints = {}
def train(net, epochs):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(epochs):
        opt.zero_grad()
        net(torch.randn(8, 128)).mean().backward()
        opt.step()
        checkpoints[epoch] = {name: w.detach().clone() for name, w in net.state_dict().items()}
train(nn.Sequential(nn.Linear(128, 384), nn.GELU(), nn.Linear(384, 128)), 1000)
""",
    "8MiB",
)

script(
    "copied state dicts",
    "leak",
    ("weights", "disk"),
    """
import copy
class Trainer:
    def __init__(self, model):
        self.model, self.saved = model, []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    def fit(self, epochs):
        for _ in range(epochs):
            self.optimizer.zero_grad(set_to_none=True)
            self.model(torch.randn(4, 16, 200)).std().backward()
            self.optimizer.step()
            self.saved.append(copy.deepcopy(self.model.state_dict()))
Trainer(nn.TransformerEncoderLayer(200, 4, 400, batch_first=True)).fit(1000)
""",
    "16MiB",
)

# --- views and arrays that keep more than they show

script(
    "first tokens",
    "leak",
    ("sentences", ".clone()"),
    """
@torch.no_grad()
def encode(model, batches):
    sentences = []
    for batch in batches:
        hidden = model(batch)
        sentences.append(hidden[:, 0])
    return torch.cat(sentences)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128)).eval()
encode(model, (torch.randn(8, 64, 64) for _ in range(1000)))
""",
    "8MiB",
)

script(
    "arrays of NumPy over results",
    "leak",
    ("embeddings", ".copy()"),
    """
import numpy as np
def embed(model, n):
    embeddings = []
    for _ in range(n):
        with torch.no_grad():
            tokens = model(torch.randn(16, 32, 64))
        embeddings.append(tokens[:, -1].numpy())
    return np.concatenate(embeddings)
embed(nn.Linear(64, 256), 1000)
""",
    "8MiB",
)

script(
    "one row of each batch",
    "leak",
    ("hardest", ".clone()"),
    """
class Miner:
    def __init__(self):
        self.hardest = {}
    def update(self, step, batch, losses):
        self.hardest[step] = batch[losses.argmax()]
def main():
    net, miner = nn.Linear(512, 1), Miner()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(10_000):
        batch = torch.randn(64, 512)
        losses = net(batch).square().squeeze(1)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        miner.update(step, batch, losses.detach())
main()
""",
    "8MiB",
)

# --- exceptions that are kept

script(
    "records of a logger",
    "traceback",
    ("exception", "records", "str("),
    """
import logging
class Collect(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []
    def emit(self, record):
        self.records.append(record)
log = logging.getLogger("train")
log.addHandler(Collect())
log.propagate = False
net = nn.Linear(256, 1024)
def step(x):
    hidden = net(x)
    scores = hidden.relu().exp()
    raise FloatingPointError("loss is NaN")
def main():
    for _ in range(1000):
        try:
            step(torch.randn(128, 256))
        except FloatingPointError:
            log.exception("skipped a batch")
main()
""",
)

script(
    "tasks of asyncio",
    "traceback",
    ("exception", "tasks", "str("),
    """
import asyncio
async def infer(i):
    request = torch.randn(64, 1024)
    await asyncio.sleep(0)
    answer = request.exp()
    raise TimeoutError(f"request {i}")
async def serve():
    tasks = []
    for i in range(1000):
        tasks.append(asyncio.create_task(infer(i)))
        await asyncio.wait(tasks[-1:])
asyncio.run(serve())
""",
    "8MiB",
)

script(
    "futures of a pool",
    "traceback",
    ("exception", "futures", "str("),
    """
from concurrent.futures import Future
def call(future, fn, *args):
    try:
        future.set_result(fn(*args))
    except Exception as error:
        future.set_exception(error)
def work(i):
    image = torch.randn(3, 128, 128)
    edges = image.diff()
    raise OSError(f"no file {i}")
def main():
    futures = []
    for i in range(1000):
        futures.append(Future())
        call(futures[-1], work, i)
main()
""",
    "8MiB",
)

# --- garbage in cycles

script(
    "an output on a context",
    "cycle",
    ("cycle", "Swish", "collect()"),
    """
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.out = x * x.sigmoid()
        return ctx.out
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.out
net = nn.Linear(256, 256)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train():
    for _ in range(10_000):
        optimizer.zero_grad()
        Swish.apply(net(torch.randn(64, 256))).mean().backward()
        optimizer.step()
train()
""",
    "4MiB",
)

script(
    "tasks of meta-learning",
    "cycle",
    ("cycle", "train.py:", ".grad = None"),
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return self.b(self.a(x).tanh())
def adapt(x, y):
    net = Net()
    for _ in range(2):
        loss = F.mse_loss(net(x), y)
        loss.backward(create_graph=True)
    return loss.item()
def main():
    for task in range(10_000):
        adapt(torch.randn(32, 64), torch.randn(32, 64))
main()
""",
    "8MiB",
)

script(
    "episodes that know their environment",
    "cycle",
    ("cycle", "Episode", "scope"),
    """
gc.disable()
class Environment:
    def __init__(self):
        self.map = torch.zeros(128, 256)
        self.episode = Episode(self)
class Episode:
    def __init__(self, environment):
        self.environment = environment
        self.frames = torch.zeros(256, 256)
def play():
    for _ in range(1000):
        environment = Environment()
        environment.map += environment.episode.frames[:128]
play()
""",
    "8MiB",
)

# --- iterators, optimizers, folds

script(
    "a loader for ever",
    "leak",
    ("batches", "itertools.cycle", "while True"),
    """
import itertools
from torch.utils.data import DataLoader, TensorDataset
def main():
    net = nn.Linear(3072, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images = torch.zeros(1, 3072).expand(4096, -1)
    batches = itertools.cycle(DataLoader(TensorDataset(images), batch_size=16, shuffle=True))
    for step in range(10_000):
        (x,) = next(batches)
        loss = net(x + step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
    "6MiB",
)

script(
    "runs of a cross-validation",
    "leak",
    ("runs", "models", "bound"),
    """
def train_fold(fold):
    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        loss = net(torch.randn(32, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"model": net, "optimizer": optimizer, "loss": loss.item()}
def main():
    runs = []
    for fold in range(1000):
        runs.append(train_fold(fold))
    print(min(run["loss"] for run in runs))
main()
""",
    "4MiB",
)

script(
    "an optimizer for each restart",
    "leak",
    ("optimizers", "bound"),
    """
def main():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizers = []
    for restart in range(1000):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (restart + 1))
        optimizers.append(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
main()
""",
    "12MiB",
)

# --- what grows inside an optimizer

script(
    "the history of LBFGS",
    "optimizer_state",
    ("LBFGS", "history_size"),
    """
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
main()
""",
    "12MiB",
)

# --- what runs is too large

script(
    "a head of a language model",
    "logits",
    ("logits", "lm_head", "linear_cross_entropy"),
    """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10_000, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.lm_head = nn.Linear(64, 10_000)
    def forward(self, tokens):
        return self.lm_head(self.rnn(self.embed(tokens))[0])
def main():
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        tokens = torch.randint(10_000, (16, 33))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 10_000), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
    "48MiB",
)

script(
    "the state of AdamW",
    "optimizer_state",
    ("AdamW", "ViT", "page("),
    """
class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(192, 256)
        blocks = (nn.TransformerEncoderLayer(256, 4, 512, batch_first=True) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)
    def forward(self, x):
        x = self.patches(x)
        for block in self.blocks:
            x = block(x)
        return x.mean()
def main():
    vit = ViT()
    opt = torch.optim.AdamW(vit.parameters(), lr=1e-3)
    for _ in range(5):
        loss = vit(torch.randn(2, 16, 192))
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
""",
    "18MiB",
)

script(
    "images that are too large",
    "batch",
    ("batch", "Stem", "step("),
    """
class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.fc = Stem(), nn.Linear(16, 10)
    def forward(self, x):
        return self.fc(self.stem(x).mean((2, 3)))
def main():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        x, y = torch.randn(8, 3, 96, 96), torch.randint(10, (8,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
    "12MiB",
)

script(
    "a model that does not fit",
    "weights",
    ("weights", "Giant", "page("),
    """
class Giant(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(depth))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x
model = Giant(32)
model(torch.randn(1, 512))
""",
)

script(
    "casts that autocast keeps",
    "leak",
    ("autocast", "cache_enabled=False"),
    """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x
def evaluate(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(20):
            with torch.no_grad():
                print(model(torch.randn(4, 512)).sum().item())
evaluate(Deep().eval())
""",
    "11MiB",
)

script(
    "a wide hidden layer",
    "batch",
    ("batch", "train.py:", "step("),
    """
class SparseAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(96, 1536), nn.Linear(1536, 96)
    def forward(self, x):
        code = F.relu(self.encoder(x))
        return self.decoder(code), code
def main():
    sae = SparseAutoencoder()
    optimizer = torch.optim.Adam(sae.parameters())
    for _ in range(4):
        x = torch.randn(1024, 96)
        out, code = sae(x)
        loss = (out - x).pow(2).mean() + 1e-3 * code.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
    "16MiB",
)

script(
    "a data set in memory",
    "batch",
    ("batch", "train.py:", "step("),
    """
from torch.utils.data import DataLoader
samples = [torch.randn(256) for _ in range(4000)]  # made once, and wanted
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train():
    for batch in DataLoader(samples, batch_size=1000, shuffle=True):
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
train()
""",
    "13MiB",
)

script(
    "validation with graphs",
    "leak",
    ("previous", "pred", "no_grad()"),
    """
def validate(net, n):
    net.eval()
    worst = 0.0
    for _ in range(n):
        x = torch.randn(256, 256)
        pred = net(x)
        worst = max(worst, (pred - x).abs().max().item())
    return worst
net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
validate(net, 100)
""",
    "5MiB",
)
