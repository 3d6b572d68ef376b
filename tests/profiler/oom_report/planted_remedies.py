"""Programs whose first line has to fit the very statement, container or model that is wrong."""

from torch.nn import functional as F

from .planted import plant

_HAS_LOSS = hasattr(F, "linear_cross_entropy")  # since torch 2.13
REMEDIES = []


def remedy(name, cause, says, code, size="8MiB", **options):
    plant(name, cause, says, code, size=size, into=REMEDIES, **options)


remedy(
    "a running loss",
    "leak",
    ("running_loss += loss.item()",),
    """
def main():
    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    running_loss = 0.0
    for step in range(2000):
        loss = F.cross_entropy(net(torch.randn(64, 128)), torch.randint(10, (64,)))
        running_loss += loss
main()
""",
)

remedy(
    "values of validation",
    "leak",
    ("metrics['val'][…]", "Keep val.item()"),
    """
def main():
    net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
    metrics = {"train": [], "val": []}
    for epoch in range(50):
        loss = net(torch.randn(32, 64)).square().mean()
        loss.backward()
        metrics["train"].append(loss.item())
        val = net(torch.randn(32, 64)).square().mean()
        metrics["val"].append(val)
main()
""",
)

remedy(
    "log-probabilities that backward needs",
    "leak",
    ("saved_log_probs.clear() after backward()",),
    """
class Agent:
    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
        self.saved_log_probs, self.rewards = [], []
    def act(self, state):
        choice = torch.distributions.Categorical(logits=self.policy(state))
        action = choice.sample()
        self.saved_log_probs.append(choice.log_prob(action))
        self.rewards.append(1.0)
    def finish(self):
        policy_loss = []
        for log_prob, reward in zip(self.saved_log_probs, self.rewards):
            policy_loss.append(-log_prob.mean() * reward)
        loss = torch.stack(policy_loss).sum()
        loss.backward(retain_graph=True)
        self.rewards.clear()
agent = Agent()
for episode in range(200):
    for t in range(20):
        agent.act(torch.randn(16, 16))
    agent.finish()
""",
)

remedy(
    "a pool of fakes, which grows without graphs as well",
    "leak",
    ("fake_pool[…]", "fake.detach(), and bound it"),
    """
def main():
    generator, fake_pool = nn.Linear(32, 512), []
    critic = nn.Linear(512, 1)
    for _ in range(1000):
        fake = generator(torch.randn(32, 32)).relu()
        fake_pool.append(fake)
        loss = critic(fake_pool[0].detach()).mean()
        loss.backward()
main()
""",
)

remedy(
    "a list that is being made of batches",
    "leak",
    ("container at train.py:", "one at a time"),
    """
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, i):
        return torch.randn(3, 24, 24), i % 10
def main():
    batches = list(DataLoader(Images(), batch_size=32))
main()
""",
)

remedy(
    "a comprehension of predictions",
    "results",
    ("container at train.py:", "no_grad()"),
    """
def predict(net, x, n):
    return torch.stack([net(x) for _ in range(n)]).mean(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
predict(net, torch.randn(128, 64), 200)
""",
)

remedy(
    "tensors that are keys",
    "leak",
    ("Memo.seen[…] keeps", "bound it"),
    """
class Memo:
    def __init__(self):
        self.seen = {}
    def __call__(self, x):
        if x not in self.seen:
            self.seen[x] = x.sum()
        return self.seen[x]
memo = Memo()
for i in range(5000):
    memo(torch.randn(64, 64))
""",
)

remedy(
    "a teacher that records",
    "batch",
    ("no optimizer steps the Sequential", "torch.no_grad()"),
    """
def main():
    parts = [part for _ in range(12) for part in (nn.Linear(128, 128), nn.ReLU())]
    teacher, student = nn.Sequential(*parts), nn.Linear(128, 128)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(10):
        x = torch.randn(1500, 128)
        target = teacher(x)
        loss = F.mse_loss(student(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
)

remedy(
    "attention over one text",
    "batch",
    ("shorten its input",),
    """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
    def forward(self, x):
        q, k, v = self.qkv(x).view(1, -1, 4, 48).transpose(1, 2).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v
Attention()(torch.randn(1, 1024, 64)).sum().backward()
""",
    "16MiB",
)

remedy(
    "a default argument",
    "leak",
    ("store[…] keeps", "store=None"),
    """
def collect(x, store=[]):
    store.append(x)
    return torch.stack(store[-3:]).mean(0)
@torch.no_grad()
def main():
    net = nn.Linear(64, 64)
    for i in range(5000):
        collect(net(torch.randn(64, 64)))
main()
""",
)

remedy(
    "a data set that is loaded",
    "leak",
    ("docs[…] keeps", "load a part"),
    """
def load(vocabulary, n):
    docs = []
    for i in range(n):
        docs.append(F.one_hot(torch.randint(vocabulary, (32,)), vocabulary))
    return docs
def main():
    docs = load(1000, 200)
    net = nn.Linear(1000, 16)
    for doc in docs:
        net(doc.float()).sum().backward()
main()
""",
)

remedy(
    "momentum of SGD",
    "optimizer_state",
    ("SGD (opt)", "momentum=0"),
    """
def main():
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        net(torch.randn(2, 512)).mean().backward()
        opt.step()
main()
""",
)

remedy(
    "closures with two results each",
    "leak",
    ("pending[…] keeps", "7.", "MiB. Bound it,"),
    """
def logger(loss, pred):
    return lambda: f"{loss.item():.3f} {pred.mean().item():.3f}"
def main():
    net, pending = nn.Linear(64, 64), []
    for step in range(3000):
        x = torch.randn(64, 64)
        pred = net(x).square()
        loss = F.mse_loss(pred, x)
        loss.backward()
        pending.append(logger(loss, pred))
main()
""",
)

remedy(
    "steps of Adam beside a buffer",
    "leak",
    ("memory[…]", "bound it"),
    """
class Replay:
    def __init__(self):
        self.memory = []
    def push(self, *transition):
        self.memory.append(transition)
def main():
    net, buffer = nn.Linear(256, 256), Replay()
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    for t in range(10_000):
        buffer.push(torch.rand(16, 512), t)
        net(torch.rand(2, 256)).mean().backward()
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            sys.exit()
main()
""",
)

remedy(
    "entropies beside a loss that is summed up",
    "leak",
    ("agent.entropies[…]", "Keep .item() of each"),
    """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
        self.log_probs, self.entropies = [], []
    def act(self, observed):
        choice = torch.distributions.Categorical(logits=self.body(observed))
        self.log_probs.append(choice.log_prob(choice.sample()))
        self.entropies.append(choice.entropy().mean())
def finish(agent, optimizer):
    loss = 0
    for log_prob in agent.log_probs:
        loss = loss - log_prob.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    agent.log_probs.clear()
def main():
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters())
    for episode in range(200):
        for _ in range(5):
            agent.act(torch.randn(32, 64))
        finish(agent, optimizer)
        agent.eval()
        for _ in range(20):
            agent.act(torch.randn(32, 64))
        agent.log_probs.clear()
        agent.train()
main()
""",
)

remedy(
    "a replay buffer that is never full",
    "leak",
    ("buffer.memory[…]", "lower its maxlen="),
    """
from collections import deque
class ReplayBuffer:
    def __init__(self, capacity=100_000):
        self.memory = deque(maxlen=capacity)
    def push(self, state, reward):
        self.memory.append((state, reward))
def main():
    buffer = ReplayBuffer()
    for step in range(5000):
        buffer.push(torch.rand(64, 64), 1.0)
main()
""",
)

remedy(
    "a replay buffer that is full",
    "batch",
    ("chunked()",),
    """
from collections import deque
class ReplayBuffer:
    def __init__(self):
        self.memory = deque(maxlen=100)
def main():
    buffer = ReplayBuffer()
    for step in range(200):
        buffer.memory.append(torch.rand(64, 64))
    x = torch.rand(1 << 19)
    for _ in range(100):
        x = torch.cat([x, x]).sin() * 2
main()
""",
)

remedy(
    "answers of requests that are gathered",
    "results",
    ("asyncio.gather() gets (", "torch.no_grad()"),
    """
import asyncio
class Service:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 16)).eval()
    async def infer(self, i):
        await asyncio.sleep(0)
        return self.model(torch.full((64, 128), i)).softmax(-1)
async def main():
    service = Service()
    await asyncio.gather(*(service.infer(float(i)) for i in range(200)))
asyncio.run(main())
""",
)

remedy(
    "gradients of a stage that is over",
    "gradients",
    ("encoder keeps", "zero_grad(set_to_none=True)"),
    """
def pretrain(encoder):
    sgd = torch.optim.SGD(encoder.parameters(), 1e-3)
    for _ in range(3):
        sgd.zero_grad()
        encoder(torch.randn(32, 512)).square().mean().backward()
        sgd.step()
def finetune(encoder):
    encoder.requires_grad_(False).eval()
    head = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 9))
    adam = torch.optim.Adam(head.parameters())
    for _ in range(20):
        with torch.no_grad():
            z = encoder(torch.randn(256, 512))
        loss = head(z).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
encoder = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 1024), nn.Linear(1024, 64))
pretrain(encoder)
finetune(encoder)
""",
    size="46MiB",
)

remedy(
    "a loss of two shapes",
    "batch",
    ("[4096, 1] and [4096] broadcast to [4096, 4096]", "squeeze()", "train.py:"),
    """
def main():
    net = nn.Linear(16, 1)
    x = torch.randn(4096, 16)
    loss = (net(x) - x.sum(1)).abs().mean()
    loss.backward()
main()
""",
    size="32MiB",
)

remedy(
    "logits that are cut before their loss",
    "logits",
    ("lm.wte for 16000 classes", "linearcrossentropyoptions" if _HAS_LOSS else "step()"),
    """
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
""",
    size="96MiB",
)

remedy(
    "a list that a helper fills",
    "results",
    ("seen[…] keeps", "chunked(collect=)"),
    """
def remember(store, x):
    store.append(x)
def main():
    seen, net = [], nn.Linear(512, 8)
    with torch.no_grad():
        for _ in range(1000):
            x = torch.randn(32, 512)
            remember(seen, x)
            net(x).argmax()
main()
""",
)
