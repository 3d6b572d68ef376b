"""A compiled model on a small device: one graph for all sizes, the gradients of the whole batch."""

import logging
import sys
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from tenure.adaptive import statistics, step
from tenure.testing import simulated_accelerator

N_STEPS, N_SAMPLES, LENGTH, WIDTH = 3, 64, 16, 32


class Classifier(nn.Module):
    """A layer of a transformer over token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 4)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Class scores of each sequence."""
        x = self.layer(self.embedding(tokens))
        scores: torch.Tensor = self.head(x.mean(1))
        return scores


def main() -> None:
    """Train twice from one start: on a device that is large enough, and on a third of it."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    # a GPU takes torch's default compiler; what the simulated device runs needs no C++ of its own
    graphs = CompileCounterWithBackend("aot_eager")
    with simulated_accelerator() as sim:
        torch.manual_seed(0)
        model, reference = Classifier().double(), Classifier().double()
        reference.load_state_dict(model.state_dict())
        model.to(sim.device)
        reference.to(sim.device)
        tokens = torch.randint(50, (N_SAMPLES, LENGTH))
        batch = {"tokens": tokens.to(sim.device), "label": (tokens.sum(1) % 4).to(sim.device)}

        def loss_of(batch: dict[str, torch.Tensor], model: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch["tokens"]), batch["label"])

        before = sim.allocated_bytes
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
        for _ in range(N_STEPS):
            loss_of(batch, reference).backward()
            optimizer.step()
            optimizer.zero_grad()
        state_bytes = sim.allocated_bytes - before
        activation_bytes = sim.peak_bytes - before - 2 * state_bytes

        compiled = torch.compile(model, backend=graphs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sim.budget_bytes = sim.allocated_bytes + 2 * state_bytes + activation_bytes // 3
        sizes = []
        for _ in range(N_STEPS):
            # the lines that a loop needs: forward and backward in micro-batches that fit
            result = step(lambda batch: loss_of(batch, compiled), batch)
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(result.micro_batch)

        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        farthest = max(float((a - b).detach().abs().max()) for a, b in pairs)
    print(f"{N_STEPS} steps in micro-batches of {sizes}, {graphs.frame_count} graph compiled")
    print(f"{statistics().ooms} times out of memory; farthest parameter: {farthest:.0e}")
    assert graphs.frame_count == 1
    assert farthest < 1e-9


if __name__ == "__main__":
    main()
