"""The program of the last chapter: it knows nothing of tenure, and one of its lines leaks."""

import torch


def train() -> None:
    """Learn, and note how it went."""
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(24):
        loss = model(torch.randn(256, 512)).square().mean()
        losses.append(loss)  # for a plot
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()


train()
