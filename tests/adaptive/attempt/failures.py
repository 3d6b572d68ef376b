"""How work runs out of memory in tests."""

import torch


def oom():
    """Run out of a device's memory."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def out_of_memory_above(size):
    """What a chunk does that is too large."""

    def check(n):
        if n > size:
            oom()

    return check


def out_of_memory_once():
    """What work does that runs out of memory the first time."""
    turns = [oom]

    def check():
        if turns:
            turns.pop()()

    return check


def on_sim(n_bytes):
    """Memory of the simulated device."""
    return torch.empty(n_bytes, dtype=torch.uint8, device="sim")
