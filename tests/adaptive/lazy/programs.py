"""What the tests of recorded tensors share: memory for a number of samples, and comparisons."""

from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tenure.adaptive import lazy

WIDE = 48
"""A width that nothing but the activations of a model has."""


_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


class RoomFor(TorchDispatchMode):
    """Products of matrices with more rows than so many run out of memory.

    Attributes:
        rows: of those that ran, how many rows each had.
    """

    def __init__(self, most):
        super().__init__()
        self._most = most
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        wide = isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == WIDE
        # inference mode takes no product apart
        if wide and not isinstance(out, FakeTensor) and func in _PRODUCTS:
            if out.shape[0] > self._most:
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


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def kept_random_state():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def plain(*values):
    return values[0] if len(values) == 1 else values


def assert_same_gradients(model, program, room=None):
    """Run a program with plain tensors and with recorded ones; what both returned.

    Args:
        model: whose gradients are compared.
        program: gets what makes tensors recorded ones, or leaves them as they are.
        room: how many samples fit; None: all.
    """
    model.zero_grad()
    with kept_random_state():
        expected = program(plain)
    wanted = gradients(model)
    model.zero_grad()
    with RoomFor(room) if room else nullcontext():
        found = program(lazy)
    got = gradients(model)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-11, atol=1e-13)
    model.zero_grad()
    return expected, found
