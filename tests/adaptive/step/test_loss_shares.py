"""Weights and counts of every type of number weigh as numbers do."""

import fractions
import math

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, step

from .step_cases import gradients, made, worst_error

_EXACT = 1e-10


def _train(net, fn, batch, **options):
    net.zero_grad()
    result = step(fn, batch, **options)
    return result, gradients(net)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool])
@pytest.mark.parametrize("n_terms", [1, 2])
def test_counts_of_few_bits_are_summed_in_more(dtype, n_terms):
    net = nn.Linear(2, 1).double()
    x = torch.randn(257, 2, dtype=torch.float64)
    per_sample = 1 if dtype is torch.bool else 255 if dtype is torch.uint8 else 2048

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


def _numbers():
    yield "fraction", fractions.Fraction
    yield "float64 tensor", lambda n: torch.tensor(float(n), dtype=torch.float64)
    yield "bfloat16 tensor", lambda n: torch.tensor([n], dtype=torch.bfloat16)
    yield "tensors and numbers", lambda n: torch.tensor(n) if n % 2 else n
    yield "tensors of two types", lambda n: torch.tensor(n) if n % 2 else torch.tensor(float(n))
    np = pytest.importorskip("numpy")
    yield "numpy int", np.int64
    yield "numpy float32", np.float32
    yield "numpy array", lambda n: np.array([n])
    yield "numpy and python", lambda n: np.int32(n) if n % 2 else n


NUMBERS = dict(_numbers())


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("way", ["weight", "count"])
def test_every_kind_of_number_is_taken(number, way):
    net, batch = made("MLP", 9, 0)
    make = NUMBERS[number]

    def mean(b):
        return net(b["x"]).square().mean()

    def pair(b):
        return mean(b) * len(b["y"]), make(len(b["y"]))

    _, wanted = _train(net, mean, batch)
    options = {"weight": lambda b: make(len(b["y"]))} if way == "weight" else {}
    _, got = _train(net, mean if way == "weight" else pair, batch, maximum=4, **options)
    assert worst_error(got, wanted) <= _EXACT


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda b: {"a": 1, "b": 2}, r"returned \{'a': 1, 'b': 2\} .* return a dict of pairs"),
        (lambda b: "3", "returned '3' for a micro-batch"),
        (lambda b: True, "returned True for a micro-batch"),
        (lambda b: 1j, "returned 1j for a micro-batch"),
        (lambda b: torch.tensor(1j), "returned 1j for a micro-batch"),
        (lambda b: torch.tensor(math.inf), "returned inf for a micro-batch"),
        (lambda b: torch.ones(3) if len(b) == 2 else 4, r"returned float32\[3\] on cpu"),
    ],
)
def test_what_is_no_weight_is_described(weight, message):
    net, x = nn.Linear(4, 1), torch.randn(9, 4)
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: net(b).mean(), x, weight=weight, maximum=4, verify=False)


def test_a_count_that_is_no_number_is_described():
    np = pytest.importorskip("numpy")
    net = nn.Linear(4, 1)
    for count in (np.ones(2), np.array("3"), np.bool_(True), True):
        with pytest.raises(AdaptiveUsageError, match="returned a count of a "):
            step(lambda b, count=count: (net(b).sum(), count), torch.randn(9, 4), maximum=4)


def test_weights_on_two_devices_are_read_from_each(sim):
    net, batch = made("MLP", 9, 0)

    def mean(b):
        return net(b["x"]).square().mean()

    def weight(b):
        n = len(b["y"])
        return torch.tensor(n, device="cpu" if n == 1 else "sim")

    _, wanted = _train(net, mean, batch)
    _, got = _train(net, mean, batch, maximum=4, weight=weight)
    assert worst_error(got, wanted) <= _EXACT
