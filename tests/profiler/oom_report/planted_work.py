"""More planted programs: nothing is kept without use, and what runs is too large."""

from .planted import plant

# --- what runs


GPT = """
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))
class GPT(nn.Module):
    def __init__(self, vocabulary, d, n):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, d), nn.Linear(d, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
# the rest of a `main` that has made them
TRAINED = """
    for _ in range(3):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
"""

plant(
    "logits",
    "logits",
    ("logits", "linear_cross_entropy"),
    GPT
    + """
def main():
    model = GPT(8000, 64, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(8000, (8, 128))
"""
    + TRAINED,
    size="80MiB",
)

plant(
    "logits of GPT-2",
    "logits",
    ("logits", "linear_cross_entropy"),
    """
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=20_000, n_positions=128)
model = GPT2LMHeadModel(config)
def main():
    tokens = torch.randint(20_000, (8, 128))
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
main()
""",
    size="160MiB",
    imported=("transformers",),
)

plant(
    "a batch of a transformer",
    "batch",
    ("batch", "step("),
    GPT
    + """
def main():
    model = GPT(128, 64, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(128, (64, 128))
"""
    + TRAINED,
    size="64MiB",
)

plant(
    "a batch beside a list of numbers",
    "batch",
    ("batch", "step("),
    """
def main():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, norms = [], []
    for size in (64, 64, 64, 64, 64, 4096):  # the last is of another data set
        loss = net(torch.randn(size, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append(loss.detach())
main()
""",
)

plant(
    "a batch beside a cache that is bounded",
    "batch",
    ("batch", "step("),
    """
from collections import deque
def main():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)))
    replay = deque(maxlen=8)
    for n in (64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 2048):
        x = torch.randn(n, 256)
        replay.append(x[:64].clone())
        net(x).square().mean().backward()
main()
""",
)

plant(
    "images in evaluation",
    "batch",
    ("batch", "chunked"),
    """
net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
net.eval()
images = torch.randn(64, 3, 64, 64)
with torch.no_grad():
    net(images)
""",
    size="24MiB",
)

plant(
    "skips of a U-Net",
    "batch",
    ("batch", "step("),
    """
class UNet(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(n))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(n))
    def forward(self, x):
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1)).relu()
        return x
net = UNet(6)
net(torch.randn(8, 8, 64, 64)).square().mean().backward()
""",
    size="24MiB",
)

plant(
    "a state that is never cut",
    "leak",
    ("h carries its graph", "retain_graph=True at train.py", "h.detach()"),
    """
def main():
    cell, head, h = nn.GRUCell(32, 64), nn.Linear(64, 10), torch.zeros(64, 64)
    while True:
        for x in torch.randn(8, 64, 32):
            h = cell(x, h)
        loss = F.cross_entropy(head(h), torch.randint(0, 10, (64,)))
        loss.backward(retain_graph=True)
main()
""",
)

plant(
    "a long sequence",
    "batch",
    ("batch", "state is never cut", "train.py:", "detach()"),
    """
def main():
    cell, head = nn.LSTMCell(32, 64), nn.Linear(64, 4)
    x = torch.randn(600, 32, 32)
    h = c = torch.zeros(32, 64)
    for step in x:
        h, c = cell(step, (h, c))
    head(h).square().mean().backward()
main()
""",
)

plant(
    "all pairs",
    "batch",
    ("batch", "chunked"),
    """
points = torch.randn(4096, 3)
distances = torch.cdist(points, points)
print(distances.median())
""",
)

plant(
    "a batch on a device",
    "batch",
    ("batch", "step("),
    """
net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6))).to(DEVICE)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for n in (32, 32, 2048):
    x = torch.randn(n, 256).to(DEVICE)
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
""",
    place="sim-cuda",
    size="24MiB",
)


# --- weights and their state


plant(
    "the first step of AdamW",
    "optimizer_state",
    ("AdamW", "first step"),
    """
def main():
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(3):
        loss = net(torch.randn(8, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
main()
""",
    size="20MiB",
)

plant(
    "the first step on a device",
    "optimizer_state",
    ("Adam", "first step"),
    """
net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).to(DEVICE)
optimizer = torch.optim.Adam(net.parameters())
losses = []
for _ in range(3):
    loss = net(torch.randn(8, 512).to(DEVICE)).square().mean()
    loss.backward()
    losses.append(float(loss))
    optimizer.step()
""",
    place="sim",
    size="20MiB",
)

plant(
    "a model too large to be made",
    "weights",
    ("weights", "page("),
    """
def build():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(40)))
model = build()
""",
)

plant(
    "a model too large for the device",
    "weights",
    ("weights", "page("),
    """
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40)))
model.to(DEVICE)
""",
    place="sim",
)


# --- the allocator, and others


plant(
    "lengths that differ",
    "fragmentation",
    ("fragmentation", "expandable_segments"),
    """
parts = [torch.empty(9 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(10)]
kept = parts[::2]
del parts
whole = torch.empty(15 << 20, dtype=torch.uint8, device=DEVICE)
""",
    place="sim-cuda",
    size="100MiB",
)

plant(
    "another process",
    "other_process",
    ("another process",),
    """
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
""",
)

plant(
    "arrays of NumPy",
    "host",
    ("host", "numpy"),
    """
import numpy
arrays = []
while True:
    arrays.append(numpy.ones((1024, 1024)))
    torch.ones(1024, 256)
""",
    place="process",
    size="250MiB",
)
