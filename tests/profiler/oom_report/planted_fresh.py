"""Nine scripts more, written after the rules for the others, without a look at these rules."""

from .planted import plant

FRESH = []


def fresh(name, cause, says, code, size="16MiB", **options):
    plant(name, cause, says, code, size=size, into=FRESH, **options)


fresh(
    "gradients of a teacher",
    "gradients",
    ("gradients", "teacher", "set_to_none=True"),
    """
class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(256, width), nn.Linear(width, width)
        self.fc3 = nn.Linear(width, 256)
    def forward(self, x):
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())
def pretrain(net, steps):
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(steps):
        sgd.zero_grad()
        net(torch.randn(32, 256)).pow(2).mean().backward()
        sgd.step()
def distill(teacher, student, steps):
    sgd = torch.optim.SGD(student.parameters(), lr=0.05)
    for _ in range(steps):
        batch = torch.randn(1024, 256)
        with torch.no_grad():
            target = teacher(batch)
        loss = F.mse_loss(student(batch), target)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
def main():
    teacher, student = MLP(800), MLP(64)
    pretrain(teacher, 3)
    distill(teacher, student, 50)
main()
""",
    "16MiB",
)

fresh(
    "a conversation",
    "leak",
    ("history", "cat", "bound"),
    """
class Chat:
    def __init__(self, embed, block):
        self.embed, self.block = embed, block
        self.history = {"states": None}
    @torch.no_grad()
    def say(self, tokens):
        states = self.embed(tokens)
        old = self.history["states"]
        self.history["states"] = states if old is None else torch.cat([old, states], dim=0)
        return self.block(self.history["states"][-16:]).argmax(-1)
chat = Chat(nn.Embedding(500, 256), nn.Linear(256, 500))
while True:
    chat.say(torch.randint(500, (64,)))
""",
    "8MiB",
)

fresh(
    "a filter that learns online",
    "leak",
    ("belief", "detach()"),
    """
class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.predict, self.correct = nn.Linear(64, 64), nn.Linear(96, 64)
    def forward(self, belief, observation):
        prior = torch.tanh(self.predict(belief))
        return torch.tanh(self.correct(torch.cat([prior, observation], -1)))
def online(model, stream):
    belief = torch.zeros(128, 64)
    for t, (observation, truth) in enumerate(stream):
        belief = model(belief, observation)
        error = (belief - truth).square().mean()
        error.backward(retain_graph=True)
online(Filter(), ((torch.randn(128, 32), torch.randn(128, 64)) for _ in range(100_000)))
""",
    "8MiB",
)

fresh(
    "a moving average of weights",
    "leak",
    ("shadow", "weights", "disk"),
    """
from collections import defaultdict
class Averager:
    def __init__(self):
        self.shadow = defaultdict(list)
    def collect(self, model):
        for name, parameter in model.named_parameters():
            self.shadow[name].append(parameter.data.clone())
def fit():
    model, averager = nn.LSTM(64, 96, num_layers=2), Averager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10_000):
        out, _ = model(torch.randn(4, 2, 64))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averager.collect(model)
fit()
""",
    "10MiB",
)

fresh(
    "crops of large images",
    "leak",
    ("crops", ".clone()"),
    """
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
""",
    "8MiB",
)

fresh(
    "failed requests of a service",
    "traceback",
    ("exception", "failures", "str("),
    """
class Service:
    def __init__(self):
        self.model = nn.Linear(512, 512)
        self.failures = {}
    def handle(self, n, payload):
        features = self.model(payload)
        logits = features.softmax(-1)
        if not torch.isnan(logits).any():
            raise ValueError(f"request {n}")
        return logits
    def serve(self):
        for n in range(10_000):
            try:
                self.handle(n, torch.randn(64, 512))
            except ValueError as problem:
                self.failures[n] = problem
with torch.no_grad():
    Service().serve()
""",
    "8MiB",
)

fresh(
    "a solver that knows its problem",
    "cycle",
    ("cycle", "Solver", "collect()"),
    """
gc.disable()
class Solver:
    def __init__(self, matrix):
        self.matrix = matrix
        self.step = lambda x: self.matrix @ x
    def solve(self, x, n=3):
        for _ in range(n):
            x = self.step(x)
        return x.norm().item()
def sweep():
    return [Solver(torch.randn(256, 256) / 16).solve(torch.randn(256)) for _ in range(500)]
sweep()
""",
    "8MiB",
)

fresh(
    "trials of a search",
    "leak",
    ("trials", "models"),
    """
from dataclasses import dataclass
@dataclass
class Trial:
    lr: float
    net: nn.Module
    optimizer: torch.optim.Optimizer
    score: float = 0.0
def search(n):
    trials = []
    for i in range(n):
        net = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
        trial = Trial(10 ** -(i % 4), net, torch.optim.Adam(net.parameters()))
        for _ in range(5):
            loss = F.cross_entropy(net(torch.randn(32, 200)), torch.randint(10, (32,)))
            trial.optimizer.zero_grad()
            loss.backward()
            trial.optimizer.step()
        trial.score = loss.item()
        trials.append(trial)
    return max(trials, key=lambda trial: trial.score)
search(500)
""",
    "6MiB",
)

fresh(
    "heat maps of key points",
    "batch",
    ("batch", "HeatMaps", "step("),
    """
class HeatMaps(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.features = nn.Conv2d(3, 12, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.maps = nn.Conv2d(12, n, 1)
    def forward(self, x):
        return self.maps(self.up(self.features(x).relu()))
def main():
    net = HeatMaps(17)
    optimizer = torch.optim.AdamW(net.parameters())
    for size in (32, 32, 64):
        images, target = torch.randn(16, 3, size, size), torch.zeros(16, 17, 2 * size, 2 * size)
        loss = F.mse_loss(net(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
    "48MiB",
)
