"""Neither the model nor its batch fits, and the gradients are those of the whole.

It runs on the simulated accelerator, whose memory is counted to the byte, so it needs no GPU. That
must be there before autograd first runs, so this is a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from tenure._text import format_bytes
from tenure.adaptive import AdaptiveEvent, add_listener, remove_listener
from tenure.testing import simulated_accelerator

from . import _programs as programs
from ._processes import output_of
from ._programs import Batch, Training
from ._screen import Screen, silent
from ._settings import Settings
from ._subject import read_corpus

_SHARE_OF_DEVICE = 1.8
"""The device's memory by the weights: they would fit, with their gradients they do not."""
_SHARE_OF_BUDGET = 0.6
"""What of the weights is on the device at once."""


def tell_beyond_memory(settings: Settings) -> str:
    """What the step said, in a process of its own."""
    return output_of(__name__, json.dumps(asdict(settings)))


def _step(screen: Screen, settings: Settings) -> None:
    """Take a step on a device that holds neither, and compare its gradients with the whole."""
    corpus = read_corpus(settings.characters)
    run, whole = Training(corpus, settings), Training(corpus, settings)
    (batch,) = run.batches(1)
    # twice the precision, in which a difference is no rounding
    run.model.double()
    whole.model.double()
    weight_bytes = sum(p.nbytes for p in run.model.parameters())
    device_bytes = int(_SHARE_OF_DEVICE * weight_bytes)
    with simulated_accelerator(budget=device_bytes) as sim:
        screen.say(
            f"Weights of {format_bytes(weight_bytes)}, as much of gradients and the batch of "
            f"{settings.batch}, on a simulated device of "
            f"{format_bytes(device_bytes)}. "
            f"Plain PyTorch: {_failure(whole, batch, sim.device)}. With tenure:"
        )
        expected = whole.loss(batch)
        expected.backward()
        budget_bytes = int(_SHARE_OF_BUDGET * weight_bytes)
        decided: list[str] = []

        def note(event: AdaptiveEvent) -> None:
            decided.append(str(event))

        add_listener(note)
        try:
            with silent("tenure.adaptive"):
                found = programs.train_paged(run, batch, sim.device, budget_bytes)
        finally:
            remove_listener(note)
    for line in decided:
        screen.say(f"  {line}")
    screen.say(
        f"{found.micro_batch} of {settings.batch} windows at a time, a loss of "
        f"{found.loss.item():.6f}; of the whole it is {expected.item():.6f}, and the gradients "
        f"differ by {_apart(run, whole):.0e} at the most."
    )


def _failure(run: Training, batch: Batch, device: torch.device) -> str:
    try:
        tokens, following = batch
        run.model.to(device)
        run.loss((tokens.to(device), following)).backward()
    except torch.OutOfMemoryError as error:
        return str(error).partition(". ")[0]
    finally:
        run.model.cpu()
        run.model.zero_grad()
    return "finishes"


def _apart(run: Training, whole: Training) -> float:
    pairs = zip(run.model.parameters(), whole.model.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]


if __name__ == "__main__":
    _step(Screen(), Settings(**json.loads(sys.argv[1])))
