"""Two ranks train together, and one of them has a third of the memory that it needs.

Handwritten digits under DistributedDataParallel. Rank 1 runs out of memory and goes on in
micro-batches, rank 0 does not notice, and both end with the parameters of one process that had all
the memory and all the images.

    torchrun --standalone --nproc-per-node 2 examples/ddp_adaptive.py
"""

import logging
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tenure.adaptive import add_listener, memory_budget, step

Batch = tuple[torch.Tensor, torch.Tensor]
STEPS = 8
BATCH_SIZE = 400


def batches() -> list[Batch]:
    """What all ranks together take in a step."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = [order[i * 80 : i * 80 + BATCH_SIZE] for i in range(STEPS)]
    return [(images[i] / 16, labels[i]) for i in chosen]


def network() -> nn.Module:
    """Attention over the rows of an image, whose activations take far more than its parameters."""
    torch.manual_seed(0)
    rows = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layers = nn.Unflatten(1, (8, 8)), nn.Linear(8, 16), rows, nn.Flatten(), nn.Linear(128, 10)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the images of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(model: nn.Module, data: list[Batch], *, plain: bool = False) -> None:
    """A plain loop; `step` stands where the forward and the backward pass did."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for batch in data:
        optimizer.zero_grad()
        if plain:
            loss_of(model, batch).backward()
        else:
            step(lambda part: loss_of(model, part), batch)
        optimizer.step()


dist.init_process_group("gloo")
rank, n_ranks = dist.get_rank(), dist.get_world_size()
failures: list[str] = []
add_listener(lambda event: failures.append(event.kind) if event.kind == "shrink" else None)
logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)  # it says so of each failure

mine = [(images[rank::n_ranks], labels[rank::n_ranks]) for images, labels in batches()]
with memory_budget("1GiB") as needed:
    loss_of(network(), mine[0]).backward()
model = DistributedDataParallel(network())
with memory_budget(needed.peak_bytes // 3) if rank == 1 else nullcontext():
    train(model, mine)

alone = network()
train(alone, batches(), plain=True)
pairs = zip(model.parameters(), alone.parameters(), strict=True)
apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
print(
    f"rank {rank} ran out of memory {len(failures)} times; its parameters and those of one process "
    f"differ by {apart:.1e} at the most",
    flush=True,
)
dist.barrier()
os._exit(0)  # a group of gloo that is destroyed right after a collective may wait for ever
