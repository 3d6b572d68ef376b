"""Models, samples and failures for work on several ranks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Replicated

from ..step.step_cases import IGNORED, N_CLASSES
from ..step.step_cases import wanted_of as plain_gradients

# uneven, so that a mean of means is not the mean
SIZES = (9, 4, 14, 6)
RTOL = 1e-10


def net_of(kind="plain"):
    torch.manual_seed(0)
    hidden = nn.BatchNorm1d(8, affine=False) if kind == "buffers" else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 8), hidden, nn.Linear(8, N_CLASSES)).double()


def all_samples(sizes=SIZES):
    """The samples of each rank, the same on all; labels are ignored unevenly."""
    torch.manual_seed(1)
    parts = []
    for i, n in enumerate(sizes):
        y = torch.randint(N_CLASSES, (n,))
        y[: n * i // len(sizes)] = IGNORED
        parts.append({"x": torch.randn(n, 4, dtype=torch.float64), "y": y})
    return parts


def joined(parts):
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def square(run, b):
    return run(b["x"]).square().mean()


def squares(run):
    return lambda b: square(run, b)


def wanted_of(net, parts):
    """The gradients of one process that has the samples of all."""
    net.zero_grad()
    return plain_gradients(net, square(net, joined(parts)))


def replicated(n=2, kind="plain", **options):
    """The samples of each rank, a net, a replica of it, and the gradients of all samples."""
    parts, net = all_samples(SIZES[:n]), net_of(kind)
    return parts, net, Replicated(net, **options), wanted_of(net, parts)


class Fails:
    """A function that raises where a rank gets more samples than allowed."""

    def __init__(self, fn, most=None, error=torch.OutOfMemoryError):
        self.fn, self.most, self.error = fn, most, error

    def __call__(self, b):
        if self.most is not None and len(b["x"]) > self.most:
            raise self.error("CUDA out of memory. Tried to allocate 1.00 GiB")
        return self.fn(b)
