"""Work of a size, for tests that look for the largest that fits."""

from queue import SimpleQueue

import torch
from torch import nn

from tenure.adaptive import memory_budget


def network(device="cpu", width=64, n_layers=3):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n_layers)]
    return nn.Sequential(*layers).to(device)


def is_real(net):
    """Whether its parameters have data, as they have in no prediction."""
    return type(next(net.parameters()).data) is torch.Tensor


class Asked:
    """The sizes of which predictions run a net, in a queue, because they undo what lists get."""

    def __init__(self):
        self._queue = SimpleQueue()

    def note(self, net, size):
        if not is_real(net):
            self._queue.put(size)

    def sizes(self):
        """Those since this was called last."""
        return [self._queue.get() for _ in range(self._queue.qsize())]


class Training:
    """Forward and backward of so many rows; the sizes that were run, and those that failed."""

    def __init__(self, net, width=64):
        self.net = net
        self.width = width
        self.device = next(net.parameters()).device
        self.sizes = []
        self.failed = []

    def __call__(self, size):
        self.sizes.append(size)
        try:
            x = torch.randn(size, self.width, device=self.device)
            self.net(x).square().mean().backward()
        except torch.OutOfMemoryError:
            self.failed.append(size)
            raise

    def fits(self, size, budget):
        with memory_budget(budget):
            try:
                self(size)
            except torch.OutOfMemoryError:
                return False
            finally:
                self.net.zero_grad()
        return True
