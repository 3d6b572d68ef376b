"""Training steps to record, each built anew from the same seed."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Cube(torch.autograd.Function):
    """Keeps one tensor for its backward pass, and another in an attribute."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.square = x * x
        return ctx.square * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (ctx.square + 2 * x * x)


class Through(nn.Module):
    """A layer, and a function of what it returns."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer(x))


class Gpt(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(x).sin().exp(), x, use_reentrant=False)
        return self.head(x)


def columns(h):
    """Select from one tensor in a loop, so that autograd adds many gradients to one."""
    return torch.stack([(h[:, i] * (i + 1)).cos() * h[:, i] for i in range(8)], 1)


def chosen(h):
    """Gather from a large tensor, so that autograd fills zeros in place."""
    return h.log_softmax(1).gather(1, torch.tensor([[3, 1, 2]]).expand(len(h), 3))


def cubed():
    return nn.Sequential(Through(nn.Linear(48, 96), Cube.apply), nn.Linear(96, 3))


CASES = {
    "perceptron with a custom function": (cubed, lambda: torch.randn(16, 48), "AdamW"),
    "GPT": (Gpt, lambda: torch.randint(0, 50, (4, 16)), "AdamW"),
    "checkpoints": (Checkpointed, lambda: torch.randn(16, 48), "RMSprop"),
    "columns": (lambda: Through(nn.Linear(48, 64), columns), lambda: torch.randn(64, 48), "SGD"),
    "chosen": (lambda: Through(nn.Linear(48, 512), chosen), lambda: torch.randn(64, 48), "SGD"),
}


def training(name, steps=2, device="cpu"):
    """A function that trains a new model of this name."""
    make, batch, optimizer = CASES[name]
    torch.manual_seed(0)
    model = make().to(device)
    updates = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)

    def train():
        for _ in range(steps):
            x = batch().to(device)
            out = model(x)
            loss = F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long, device=device))
            loss.backward()
            updates.step()
            updates.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    return train
