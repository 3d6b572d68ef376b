"""Outputs of every form train what they were computed from, when the step is split."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, step

from ..step_cases import gradients, worst_error

_EXACT = 1e-10


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Scaled:
    scale: torch.Tensor
    name: str


class Net(nn.Module):
    """Two heads and a parameter that all samples share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 3).double()
        self.head = nn.Linear(4, 3).double()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def numpy(self):
        return pytest.importorskip("numpy").ones(3)


def _compare(fn, loss, out_dims, maximum=4):
    """Run the step whole and split; the error of the gradients."""
    net, x = Net(), torch.randn(9, 4, dtype=torch.float64)
    loss(fn(net, x)).backward()
    wanted = gradients(net)
    net.zero_grad()
    result = step(lambda b: fn(net, b), x, loss=loss, out_dims=out_dims, maximum=maximum)
    assert len(result.sizes) > 1
    return worst_error(gradients(net), wanted)


@pytest.mark.parametrize("value", ["a list", "an array"])
def test_outputs_that_are_no_tensors_with_rows_are_refused(value):
    net = Net()
    with pytest.raises(AdaptiveUsageError, match=r"an output\[1\] that is a .*, of whose items a"):
        step(
            lambda b: (net.body(b), list(net.head(b)) if value == "a list" else net.numpy()),
            torch.randn(9, 4).double(),
            loss=lambda o: o[0].std(),
            out_dims=(0, "items" if value == "a list" else 0),
            maximum=4,
        )


SHARED = {
    "a dict": (lambda s: {"scale": s}, lambda o: o["scale"]),
    "a list of dicts": (lambda s: [3, {"scale": [s]}], lambda o: o[1]["scale"][0]),
    "a dataclass": (lambda s: Scaled(s, "scale"), lambda o: o.scale),
    "a pair": (lambda s: Pair(s, s.detach()), lambda o: o.first * o.second),
}


@pytest.mark.parametrize("shared", SHARED)
def test_what_stands_in_a_shared_container_gets_its_gradient_once(shared):
    make, read = SHARED[shared]

    def fn(net, b):
        return net.body(b), make(net.log_scale.exp()), net.head(b)

    def loss(out):
        return ((out[0] + out[2]) * read(out[1])).logsumexp(0).sum()

    assert _compare(fn, loss, (0, None, 0)) <= _EXACT


def test_shared_values_of_every_kind_are_compared():
    tokens = object()

    def fn(net, b):
        plain = {"ids": [torch.arange(3), torch.arange(2)], "tokens": tokens, "n": 3}
        return net.body(b), net.head(b), plain

    def loss(out):
        assert out[2]["tokens"] is tokens
        return (out[0] * out[1]).std(0).sum() * len(out[2]["ids"]) * out[2]["n"]

    assert _compare(fn, loss, (0, 0, None)) <= _EXACT


@pytest.mark.parametrize(
    "make", [lambda b: [torch.tensor(len(b))], len], ids=["tensors", "numbers"]
)
def test_shared_values_that_differ_are_named(make):
    net = Net()
    with pytest.raises(AdaptiveUsageError, match=r"an output\[1\]\['x'\].* without samples that"):
        step(
            lambda b: (net.body(b), {"x": make(b)}),
            torch.randn(9, 4).double(),
            loss=lambda o: o[0].std(),
            out_dims=(0, None),
            maximum=4,
        )


class Opaque:
    """A container that nobody can take apart."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return torch.equal(self.value, other.value)

    __hash__ = None


def test_a_gradient_inside_of_an_unknown_container_is_refused():
    net = Net()
    with pytest.raises(
        AdaptiveUsageError, match=r"output\[1\] .* is a Opaque with a tensor that needs a gradient"
    ):
        step(
            lambda b: (net.body(b), Opaque(net.log_scale.exp())),
            torch.randn(9, 4).double(),
            loss=lambda o: o[0].std(),
            out_dims=(0, None),
            maximum=4,
        )
    assert net.log_scale.grad is None


@pytest.mark.parametrize("maximum", [9, 4])
def test_parameters_in_a_shared_container_of_the_batch_stay_tied(maximum):
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    parameters = dict(net.named_parameters(remove_duplicate=False))
    batch = {"x": torch.randn(9, 4), "parameters": parameters}

    def fn(b):
        return torch.func.functional_call(net, b["parameters"], (b["x"],)).square().mean()

    fn(batch).backward()
    wanted = gradients(net)
    net.zero_grad()
    step(fn, batch, in_dims={"parameters": None}, maximum=maximum)
    assert worst_error(gradients(net), wanted) <= 1e-5


def test_a_shared_container_without_a_graph_is_passed_on_itself():
    extra = {"mask": torch.ones(4), "weight": nn.Parameter(torch.ones(4))}
    extra["itself"] = extra
    seen = []

    def fn(b):
        seen.append(b["extra"])
        return Net().body(b["x"]).mean()

    batch = {"x": torch.randn(9, 4).double(), "extra": extra}
    step(fn, batch, in_dims={"extra": None}, maximum=4)
    assert all(each is extra for each in seen)
