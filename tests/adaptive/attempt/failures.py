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
