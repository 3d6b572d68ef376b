"""A training loop of accelerate, given a third of the memory that it needs.

Handwritten digits, a small network, accumulation, clipping and a schedule: the loop is a plain one
of accelerate's, and only its forward and backward pass are one call of `step`. Both loops end with
the same parameters.

    python examples/accelerate_loop.py
"""

import logging

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from tenure.adaptive import add_listener, memory_budget
from tenure.integrations.accelerate import step

Images = Subset[tuple[torch.Tensor, ...]]
EPOCHS = 5
BATCH_SIZE = 448


def digits() -> list[Images]:
    """Images to train with and images to test with, and their labels."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16), torch.tensor(labels))
    return random_split(data, [1344, 453], torch.Generator().manual_seed(0))


def network() -> nn.Module:
    """Attention over the rows of an image, whose activations take far more than its parameters."""
    rows = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layers = nn.Unflatten(1, (8, 8)), nn.Linear(8, 16), rows, nn.Flatten(), nn.Linear(128, 10)
    return nn.Sequential(*layers).double()


def train(training: Images, testing: Images, *, in_parts: bool) -> tuple[nn.Module, float]:
    """Train and test; the model, and the share of digits that it tells right."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, schedule, batches, tests = accelerator.prepare(
        model, optimizer, schedule,
        DataLoader(training, BATCH_SIZE, shuffle=True), DataLoader(testing, 32),
    )  # fmt: skip

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    for _ in range(EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model):
                if in_parts:
                    step(accelerator, loss_of, batch)
                else:
                    accelerator.backward(loss_of(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    n_right = 0
    with torch.no_grad():
        for images, labels in tests:
            right = accelerator.gather_for_metrics(model(images).argmax(1) == labels)
            n_right += int(torch.as_tensor(right).sum())
    return model, n_right / len(tests.dataset)


failures: list[str] = []
add_listener(lambda event: failures.append(event.kind) if event.kind == "shrink" else None)
logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)  # it says so of each failure
training, testing = digits()
with memory_budget("1GiB") as needed:
    plain, _ = train(training, testing, in_parts=False)
with memory_budget(needed.peak_bytes // 3) as less:
    ours, accuracy = train(training, testing, in_parts=True)
pairs = zip(plain.parameters(), ours.parameters(), strict=True)
apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
print(f"needed {needed.peak_bytes / 2**20:.1f} MiB, had {less.limit_bytes / 2**20:.1f} MiB")
print(f"ran out of memory {len(failures)} times; {accuracy:.0%} of the digits are told right")
print(f"parameters differ by {apart:.1e} at the most")
