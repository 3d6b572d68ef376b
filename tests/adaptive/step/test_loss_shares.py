"""Weights and counts of every type of number weigh as numbers do."""

import fractions

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tenure.adaptive import step

from .step_cases import compare, made


@pytest.mark.parametrize(
    ("dtype", "per_sample"), [(torch.bfloat16, 2048), (torch.uint8, 255), (torch.bool, 1)]
)
@pytest.mark.parametrize("n_terms", [1, 2])
def test_counts_of_few_bits_are_summed_in_more(dtype, per_sample, n_terms):
    net = nn.Linear(2, 1).double()
    x = torch.randn(257, 2, dtype=torch.float64)

    def fn(b):
        count = torch.tensor(per_sample if len(b) > 2 else 1).to(dtype)
        terms = {"a": (net(b).sum(), count), "b": (net(b).sum(), len(b))}
        return terms if n_terms == 2 else terms["a"]

    result = step(fn, x, maximum=128, verify=False)  # such a count is none of samples
    assert result.sizes == (128, 127, 2)
    wanted = net(x).detach().sum() / (2 * per_sample + 1)
    torch.testing.assert_close(result.terms["a" if n_terms == 2 else "loss"], wanted)
    wanted = 257 / (2 * per_sample + 1) + (n_terms == 2)
    torch.testing.assert_close(net.bias.grad, torch.tensor([wanted]).double())


NUMBERS = {
    "float": float,
    "fraction": fractions.Fraction,
    "bfloat16 tensor": lambda n: torch.tensor([n], dtype=torch.bfloat16),
    "tensors and numbers": lambda n: torch.tensor(n) if n % 2 else n,
    "tensors of two types": lambda n: torch.tensor(n) if n % 2 else torch.tensor(float(n)),
    "numpy array": lambda n: np.array([n]),
    "numpy and python": lambda n: np.int32(n) if n % 2 else n,
}


def compare_numbers(make, device="cpu"):
    """Train with weights and with counts of a kind of number."""
    net, batch = made("MLP", 9, 0)

    def mean(b):
        return net(b["x"]).square().mean()

    def pair(b):
        return mean(b) * len(b["y"]), make(len(b["y"]))

    weight = {"weight": lambda b: make(len(b["y"]))}
    # a mean stays where it is, and a sum is divided where its count is
    for fn, options, where in ((mean, weight, "cpu"), (pair, {}, device)):
        compare(net, mean(batch).to(where), fn, batch, maximum=4, **options)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_kind_of_number_is_taken(number):
    compare_numbers(NUMBERS[number])


def test_weights_on_two_devices_are_read_from_each(sim):
    compare_numbers(lambda n: torch.tensor(n, device="cpu" if n == 2 else "sim"), "sim")


class Refusing(TorchFunctionMode):
    """A device that has no float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.float64 in (*args, *kwargs.values()):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return func(*args, **kwargs)


def test_a_weight_that_is_known_late_needs_no_float64():
    net = torch.nn.Linear(4, 1, device="meta")
    batch = torch.ones(9, 4, device="meta")
    with Refusing():
        step(lambda b: (net(b).sum(), torch.tensor(len(b), device="meta")), batch, maximum=4)
    assert net.weight.grad.shape == (1, 4)
