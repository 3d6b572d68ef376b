"""A last chapter: neither the model nor its batch fits, and the gradients are those of the whole.

It runs on the simulated accelerator, whose memory is counted to the byte, so it needs no GPU. That
must be there before autograd first runs, so the chapter is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor
from torch.nn import functional

from tenure._text import format_bytes
from tenure.adaptive import AdaptiveEvent, add_listener, remove_listener
from tenure.adaptive import step as split_step
from tenure.paging import page
from tenure.testing import simulated_accelerator

from ._screen import Screen, silent
from ._subject import FULL, QUICK, CharTransformer, Settings, draw_windows, make_model, read_corpus

_SHARE_OF_DEVICE = 1.8
"""The device's memory by the weights: they would fit, with their gradients they do not."""
_SHARE_OF_BUDGET = 0.6
"""What of the weights is on the device at once."""
Batch = tuple[Tensor, Tensor]


def train_beyond_memory(screen: Screen, settings: Settings) -> None:
    """Take a step on a device that holds neither, and compare its gradients with the whole."""
    corpus = read_corpus(settings.characters)
    random = torch.Generator().manual_seed(settings.seed)
    batch = draw_windows(corpus.training, settings.batch, settings.window, random)
    # twice the precision, in which a difference is no rounding
    model, whole = (make_model(len(corpus.vocabulary), settings).double() for _ in range(2))
    weight_bytes = sum(p.nbytes for p in model.parameters())
    device_bytes = int(_SHARE_OF_DEVICE * weight_bytes)
    with simulated_accelerator(budget=device_bytes) as sim:
        screen.chapter(
            f"6. Weights of {format_bytes(weight_bytes)}, as much of gradients and a batch of "
            f"{settings.batch}, on a device of {format_bytes(device_bytes)}"
        )
        screen.say(f"Plain PyTorch: {_failure(whole, batch, sim.device)}")
        expected = _loss_of(whole.cpu(), batch)
        expected.backward()
        budget_bytes = int(_SHARE_OF_BUDGET * weight_bytes)
        with page(model, sim.device, budget=budget_bytes, training=True, activations="host"):
            done, *decided = _step(model, batch)
    for line in decided:
        screen.say(f"  {line}")
    screen.say(f"A paged model in tenure.adaptive.step: {done}, {expected.item():.6f} whole.")
    screen.say(f"The gradients differ from those of the whole by {_apart(model, whole):.0e}.")


def tell_beyond_memory(screen: Screen, settings: Settings) -> None:
    """The chapter in a process of its own."""
    which = "quick" if settings.width == QUICK.width else "full"
    command = [sys.executable, "-m", __name__, which]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    screen.say(found.stdout.rstrip("\n"))


def _loss_of(model: CharTransformer, batch: Batch) -> Tensor:
    logits = model(batch[0]).flatten(0, 1)
    return functional.cross_entropy(logits, batch[1].flatten().to(logits.device))


def _failure(model: CharTransformer, batch: Batch, device: torch.device) -> str:
    try:
        tokens, following = (each.to(device) for each in batch)
        _loss_of(model.to(device), (tokens, following)).backward()
    except torch.OutOfMemoryError as error:
        model.zero_grad()
        return str(error).partition(" (")[0]
    return "finishes."


def _step(model: CharTransformer, batch: Batch) -> list[str]:
    """A step, in words; then what was decided on the way."""
    decided: list[str] = []

    def loss_of(part: Batch) -> Tensor:
        return _loss_of(model, part)

    def note(event: AdaptiveEvent) -> None:
        decided.append(str(event))

    add_listener(note)
    try:
        with silent("tenure.adaptive"):
            found = split_step(loss_of, batch, model=model)
    finally:
        remove_listener(note)
    size, n_samples = found.micro_batch, len(batch[0])
    return [f"{size} of {n_samples} windows at a time, a loss of {found.loss.item():.6f}", *decided]


def _apart(model: CharTransformer, whole: CharTransformer) -> float:
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]


if __name__ == "__main__":
    train_beyond_memory(Screen(), QUICK if "quick" in sys.argv else FULL)
