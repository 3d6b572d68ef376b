"""Ten programs more, written after the rules and never looked at while these were made."""

from .planted import plant

HELD_OUT = []

plant(
    "metrics of validation",
    "leak",
    ("item()",),
    """
class Meter:
    def __init__(self):
        self.values = []
    def update(self, value):
        self.values.append(value)
def validate(model, meter):
    for _ in range(10_000):
        x, y = torch.randn(32, 128), torch.randn(32, 128)
        meter.update((model(x) - y).abs().mean())
meter = Meter()
validate(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)), meter)
""",
    into=HELD_OUT,
)

plant(
    "memory of an agent",
    "leak",
    ("bound",),
    """
class Agent:
    def __init__(self):
        self.policy = nn.Linear(128, 4)
        self.memory = {}
    def act(self, t, state):
        with torch.no_grad():
            action = self.policy(state).argmax(-1)
        self.memory[t] = (state, action)
        return action
agent = Agent()
for t in range(100_000):
    agent.act(t, torch.randn(256, 128))
""",
    into=HELD_OUT,
)

plant(
    "embeddings of documents",
    "results",
    ("chunked",),
    """
def embed(encoder, documents):
    vectors = []
    for document in documents:
        with torch.no_grad():
            vectors += [encoder(document)]
    return torch.stack(vectors)
encoder = nn.Sequential(nn.Linear(300, 256), nn.ReLU(), nn.Linear(256, 768))
embed(encoder, (torch.randn(100, 300) for _ in range(1000)))
""",
    into=HELD_OUT,
)

plant(
    "a tree whose leaves know their parents",
    "cycle",
    ("cycle",),
    """
class Tree:
    def __init__(self, depth, parent=None):
        self.parent, self.score = parent, torch.zeros(4096)
        self.children = [Tree(depth - 1, self) for _ in range(2)] if depth else []
def search():
    gc.disable()
    best = 0.0
    for _ in range(1000):
        root = Tree(4)
        best = max(best, root.score.sum().item())
search()
""",
    into=HELD_OUT,
)

plant(
    "failed jobs",
    "traceback",
    ("str(error)",),
    """
class Job:
    def __init__(self, n):
        self.n = n
        self.error = None
    def run(self):
        try:
            frame = torch.zeros(self.n, 256)
            frame[self.n + 1] = 1
        except IndexError as error:
            self.error = error
jobs = [Job(512) for _ in range(500)]
for job in jobs:
    job.run()
""",
    into=HELD_OUT,
)

plant(
    "a classifier of many classes",
    "logits",
    ("logits",),
    """
class Faces(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU())
        self.classifier = nn.Linear(64, 30_000)
    def forward(self, x):
        return self.classifier(self.body(x))
net, criterion = Faces(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    loss = criterion(net(torch.randn(256, 3, 8, 8)), torch.randint(30_000, (256,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    size="72MiB",
    into=HELD_OUT,
)

plant(
    "momentum",
    "optimizer_state",
    ("SGD",),
    """
net = nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 700)).abs().sum().backward()
        optimizer.step()
""",
    size="20MiB",
    into=HELD_OUT,
)

plant(
    "attention over long texts",
    "batch",
    ("batch",),
    """
class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 8
        return scores.softmax(-1) @ self.v(x)
net = Attention(64)
texts = torch.randn(4, 1024, 64)
target = torch.randn(4, 1024, 64)
for _ in range(2):
    loss = F.mse_loss(net(texts), target)
    loss.backward()
""",
    size="32MiB",
    into=HELD_OUT,
)

plant(
    "an ensemble",
    "leak",
    ("models",),
    """
def fit(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
    return model
def main():
    models = []
    for seed in range(1000):
        models.append(fit(seed))
main()
""",
    into=HELD_OUT,
)

plant(
    "a table of a data frame",
    "host",
    ("host",),
    """
import numpy
table = {}
for i in range(10_000):
    table[f"column {i}"] = numpy.random.rand(1 << 18)
    weights = torch.ones(1 << 18)
""",
    place="process",
    size="200MiB",
    into=HELD_OUT,
)
