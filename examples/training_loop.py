"""A training loop in scopes: what a step makes ends with the step, whoever still holds it."""

import torch
from torch import nn

from tenure import NewDisposeScope, is_disposed, move_to_outer


def main() -> None:
    """Fit a line, keeping every 20th loss and nothing else."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    y = 3 * x + 1
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    careless: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    for step in range(100):
        with NewDisposeScope("step"):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            careless.append(loss)  # holds on to every step; the scope lets go all the same
            if step % 20 == 0:
                kept.append(move_to_outer(loss.detach().clone()))

    assert all(map(is_disposed, careless))
    assert not any(map(is_disposed, kept))
    assert kept[-1] < 0.01 * kept[0]
    print("losses kept:", " ".join(f"{loss.item():.4f}" for loss in kept))


if __name__ == "__main__":
    main()
