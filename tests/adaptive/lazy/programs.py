"""What the tests of recorded tensors share: memory for a number of samples, and comparisons."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tenure.adaptive import lazy

from ..step.step_cases import gradients

WIDE = 48
"""A width that nothing but the activations of a model has."""
ROOMS = pytest.mark.parametrize("room", [None, 3])
"""Samples that fit: all, or fewer than a batch has."""
_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


class RoomFor(TorchDispatchMode):
    """Products of matrices with more rows than so many run out of memory.

    Attributes:
        rows: of those that ran, how many rows each had.
        n_ooms: how many did not.
    """

    def __init__(self, most):
        super().__init__()
        self._most = most
        self.rows, self.n_ooms = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        wide = isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == WIDE
        # inference mode takes no product apart
        if wide and not isinstance(out, FakeTensor) and func in _PRODUCTS:
            if out.shape[0] > self._most:
                self.n_ooms += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self.rows.append(out.shape[0])
        return out


def mlp(n_in=4, n_out=3):
    torch.manual_seed(0)
    layers = nn.Linear(n_in, WIDE), nn.ReLU(inplace=True), nn.Linear(WIDE, n_out)
    return nn.Sequential(*layers).double()


def batch(n=8, n_in=4, n_classes=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, n_in, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, n_classes, (n,), generator=generator)


class Twice(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Vision(nn.Module):
    """A token that is put before each sample, positions, and a scale that all share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp(n_out=4)
        self.token = nn.Parameter(torch.randn(1, 1, 4, dtype=torch.float64))
        self.positions = nn.Embedding(3, 4).double()
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def beside(self, n=8):
        """What is computed from parameters alone."""
        return (
            self.token.tanh().expand(n, -1, -1),
            self.positions(torch.arange(3)).sin(),
            self.scale.exp(),
        )

    def forward(self, x, beside=None):
        token, positions, scale = beside or self.beside(int(x.shape[0]))
        tokens = torch.cat([token, x.unflatten(1, (2, 2)).repeat(1, 1, 2)], 1) + positions
        return self.inner(tokens.flatten(0, 1)).unflatten(0, (-1, 3))[:, 0] * scale


def plain(*values):
    return values[0] if len(values) == 1 else values


def assert_same(model, program, room=None, *, rtol=1e-11):
    """Results and gradients of recorded tensors are those of plain ones.

    Args:
        model: whose gradients are compared.
        program: gets what makes tensors recorded ones, or leaves them as they are.
        room: how many samples fit; None: all.
        rtol: of what the program returns.
    """
    model.zero_grad()
    with torch.random.fork_rng(devices=[]):
        expected = program(plain)
    wanted = gradients(model)
    model.zero_grad()
    with RoomFor(room) if room else nullcontext():
        found = program(lazy)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)
    model.zero_grad()
    return found
