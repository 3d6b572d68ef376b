"""Real digits in a third of the memory: a plain loop in which one call is another one.

The images are those of scikit-learn. `step` stands where forward and backward stood; the network
learns what it learns with all the memory, and `chunked` counts the test images in pieces.

    python examples/digits.py
"""

import logging

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tenure.adaptive import chunked, memory_budget, step

EPOCHS, BATCH = 6, 448
# each smaller size is logged; what is told below is enough here
logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)

Images = tuple[Tensor, Tensor]


def digits() -> tuple[Images, Images]:
    """Images to train with and images to test with, and their labels, in a random order."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(x / 16).float().view(-1, 1, 8, 8)[order]
    labels = torch.tensor(y)[order]
    return (images[:1344], labels[:1344]), (images[1344:], labels[1344:])


def network() -> nn.Sequential:
    """Two convolutions, whose activations take far more than their weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def train(training: Images, limit: int | str) -> tuple[nn.Sequential, int, tuple[int, ...]]:
    """Train in so much memory: the network, the most that it took, and the last micro-batches."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def loss_of(batch: Images) -> Tensor:
        images, labels = batch
        return cross_entropy(net(images), labels)

    sizes: tuple[int, ...] = ()
    with memory_budget(limit) as budget:
        for _ in range(EPOCHS):
            for batch in zip(*(part.split(BATCH) for part in training), strict=True):
                optimizer.zero_grad()
                sizes = step(loss_of, batch).sizes
                optimizer.step()
    return net, budget.peak_bytes, sizes


def accuracy(net: nn.Module, testing: Images, limit: int) -> float:
    """The share of images that are told right, in pieces that fit."""
    images, labels = testing

    @chunked(collect="cat")
    @torch.no_grad()
    def predicted(rows: Tensor, start: int, end: int) -> Tensor:
        found: Tensor = net(rows).argmax(1)
        return found

    with memory_budget(limit):
        told: Tensor = predicted(images)
    return (told == labels).float().mean().item()


def main() -> None:
    """Train with all the memory and with a third of it, and compare."""
    training, testing = digits()
    large, peak, whole = train(training, "8GiB")
    small, held, sizes = train(training, peak // 3)
    pairs = zip(large.parameters(), small.parameters(), strict=True)
    farthest = max((a - b).abs().max().item() for a, b in pairs)
    print(f"batches of {whole[0]}: {peak / 2**20:.1f} MiB")
    print(f"in micro-batches of {sizes}: {held / 2**20:.1f} MiB")
    print(f"parameters at most {farthest:.0e} apart")
    right = accuracy(small, testing, peak // 3)
    print(f"{right:.1%} of {len(testing[1])} other images told right")
    assert held <= peak // 3
    assert right > 0.9


if __name__ == "__main__":
    main()
