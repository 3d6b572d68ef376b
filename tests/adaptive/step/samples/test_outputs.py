"""Outputs of every form train what they were computed from, when the step is split."""

import dataclasses

import numpy
import pytest
import torch
from torch import nn

from tenure.adaptive import AdaptiveUsageError, step

from ..step_cases import gradients, worst_error


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


X = torch.randn(9, 4, dtype=torch.float64)
TOKENS = object()
SHARED = {
    "a tensor": (lambda s: s, lambda o: o),
    "a dict": (lambda s: {"scale": s, "tokens": TOKENS}, lambda o: o["scale"]),
    "a list of dicts": (lambda s: [3, {"scale": [s]}], lambda o: o[1]["scale"][0] * o[0]),
    "a dataclass": (lambda s: Scaled(s, "scale"), lambda o: o.scale),
    "tensors alone": (lambda s: {"ids": [torch.arange(3)]}, lambda o: len(o["ids"][0])),
}


@pytest.mark.parametrize("shared", SHARED)
def test_what_all_samples_share_gets_its_gradient_once(shared):
    make, read = SHARED[shared]
    net = Net()

    def fn(b):
        return net.body(b), make(net.log_scale.exp()), net.head(b)

    def loss(out):
        return ((out[0] + out[2]) * read(out[1])).logsumexp(0).sum()

    loss(fn(X)).backward()
    wanted = gradients(net)
    net.zero_grad()
    assert len(step(fn, X, loss=loss, out_dims=(0, None, 0), maximum=4).sizes) > 1
    assert worst_error(gradients(net), wanted) <= 1e-10


class Opaque:
    """A container that nobody can take apart."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return torch.equal(self.value, other.value)

    __hash__ = None


@pytest.mark.parametrize(
    ("make", "dim", "message"),
    [
        (lambda net, b: list(net.head(b)), "items", r"an output\[1\] that is a list, of whose i"),
        (lambda net, b: numpy.ones(3), 0, r"an output\[1\] that is a ndarray, of whose items a"),
        (lambda net, b: {"x": len(b)}, None, r"an output\[1\]\['x'\].* without samples that"),
        (lambda net, b: {"x": torch.tensor(len(b))}, None, r"an output\[1\]\['x'\].* without"),
        (
            lambda net, b: Opaque(net.log_scale.exp()),
            None,
            r"output\[1\] .* is a Opaque with a tensor that needs a gradient",
        ),
    ],
)
def test_outputs_that_can_not_be_joined_are_refused_by_name(make, dim, message):
    net = Net()
    options = {"loss": lambda o: o[0].std(), "out_dims": (0, dim)}
    with pytest.raises(AdaptiveUsageError, match=message):
        step(lambda b: (net.body(b), make(net, b)), X, maximum=4, **options)
    assert net.log_scale.grad is None


@pytest.mark.parametrize("maximum", [9, 4])
def test_parameters_in_a_shared_container_of_the_batch_stay_tied(maximum):
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    batch = {"x": X.float(), "parameters": dict(net.named_parameters(remove_duplicate=False))}

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
    net, seen = Net(), []

    def fn(b):
        seen.append(b["extra"])
        return net.body(b["x"]).mean()

    step(fn, {"x": X, "extra": extra}, in_dims={"extra": None}, maximum=4)
    assert all(each is extra for each in seen)
