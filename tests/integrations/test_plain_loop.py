"""A loop of nobody's library: a third of the memory it needs trains the same model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tenure.adaptive import memory_budget, step


class Classifier(nn.Module):
    """Attention over a sequence, and a class; enough layers that activations take the most."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        layers = [
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)).mean(1))


def trained(batches, forward_and_backward):
    """Train for 20 steps; the parameters and the losses."""
    torch.manual_seed(0)
    model = Classifier().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses = []
    while len(losses) < 20:
        for tokens, labels in batches:
            losses.append(forward_and_backward(model, {"x": tokens, "y": labels}).item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if len(losses) == 20:
                break
    return [p.detach() for p in model.parameters()], losses


def sums(model, batch):
    """A sum over the labels that count, and how many there are."""
    loss = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum", ignore_index=-100)
    return loss, (batch["y"] != -100).sum()


def plainly(model, batch):
    total, count = sums(model, batch)
    loss = total / count
    loss.backward()
    return loss


def in_parts(model, batch):
    return step(lambda part: sums(model, part), batch).loss


@pytest.mark.parametrize(
    "n",
    [
        pytest.param(5 * 256, id="even"),
        pytest.param(4 * 256 + 30, id="a ragged end", marks=pytest.mark.slow),
    ],
)
def test_a_loop_in_a_third_of_its_memory_trains_the_same_model(n, events):
    torch.manual_seed(1)
    labels = torch.randint(5, (n,))
    labels[torch.rand(n) < 0.2] = -100
    batches = DataLoader(TensorDataset(torch.randint(13, (n, 6)), labels), batch_size=256)
    with memory_budget("1GiB") as needed:
        wanted, plain_losses = trained(batches, plainly)
    events.clear()
    with memory_budget(needed.peak_bytes // 3):
        got, losses = trained(batches, in_parts)
    assert max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)) <= 1e-6
    # no step was lost, and it did run out of memory
    assert losses == pytest.approx(plain_losses, rel=1e-9)
    n_failures = sum(event.kind in ("retry", "shrink") for event in events)
    assert 1 <= n_failures <= 3
