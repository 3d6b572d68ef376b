"""Outputs of every form train what they were computed from, also in memory used again."""

import dataclasses
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import AdaptiveUsageError, step

from .step_cases import compare, gradients, samples, small_net, squares, wanted_of, worst_error


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
SHARED = {
    "a tensor": (lambda s: s, lambda o: o),
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

    options = {"loss": loss, "out_dims": (0, None, 0), "maximum": 4}
    assert len(compare(net, loss(fn(X)), fn, X, **options).sizes) > 1


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
        (lambda net, b: Opaque(net.log_scale.exp()), None, r"output\[1\] .* is a Opaque with a te"),
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
    net.double()
    batch = {"x": X, "parameters": dict(net.named_parameters(remove_duplicate=False))}
    shared, seen = {"mask": torch.ones(4), "weight": nn.Parameter(torch.ones(4))}, []
    batch["extra"] = shared

    def fn(b):
        seen.append(b["extra"])
        return torch.func.functional_call(net, b["parameters"], (b["x"],)).square().mean()

    dims = {"parameters": None, "extra": None}
    compare(net, fn(batch), fn, batch, in_dims=dims, maximum=maximum)
    # what has no graph is passed on itself
    assert all(each is shared for each in seen)


# --- functions that compute each time in the same memory

EITHER = pytest.mark.parametrize("verify", [True, False])


@EITHER
@pytest.mark.parametrize("make", [lambda: torch.zeros(()).double(), lambda: numpy.zeros(1)])
def test_weights_and_counts_in_one_memory_are_those_of_each_micro_batch(make, verify):
    net, held = small_net(), make()
    batch = {"x": samples(16), "mask": (torch.arange(16) % 5 == 0).double()}
    batch["mask"][:4] = 1

    def filled(b):
        held[...] = float(b["mask"].sum())
        return held

    def mean(b):
        return (net(b["x"]).square().sum(1) * b["mask"]).sum() / b["mask"].sum()

    def terms(b):
        total = (net(b["x"]).square().sum(1) * b["mask"]).sum()
        return {"a": (total, filled(b)), "b": (net(b["x"]).exp().sum(), len(b["x"]))}

    how = {"maximum": 4, "verify": verify}
    compare(net, mean(batch), mean, batch, weight=filled, **how)
    compare(net, mean(batch) + net(batch["x"]).exp().sum() / 16, terms, batch, **how)


@EITHER
def test_losses_in_one_memory_are_compared_and_returned_as_they_were(verify):
    net, held = small_net(), torch.zeros((), dtype=torch.float64)
    mean, batches = squares(net), [samples(16), 2 * samples(16), samples(4)]

    def fn(b):
        return held.detach_().copy_(mean(b))

    def then(value):
        return held.detach_().copy_(value.sqrt())

    results = [step(fn, batch, maximum=4, verify=verify).loss for batch in batches]
    split = gradients(net)
    net.zero_grad()
    wanted = [mean(batch) for batch in batches]
    assert worst_error(split, wanted_of(net, sum(wanted))) < 1e-10
    torch.testing.assert_close(results, [each.detach() for each in wanted])
    results = [step(mean, batch, then=then, maximum=4).loss for batch in batches]
    torch.testing.assert_close(results, [each.detach().sqrt() for each in wanted])


HELD = torch.zeros(16, 3, dtype=torch.float64)


def _two_in_one_memory(net, b):
    """Without a common element."""
    out = net(b).T.contiguous()
    return out[0], out[1]


WRITTEN = {
    "the function fills one memory": (
        lambda net, b: (net(b), HELD[: len(b)].copy_(b[:, :3])),
        lambda outputs: F.mse_loss(*outputs).sqrt(),
    ),
    "the loss writes outputs": (
        lambda net, b: net(b),
        lambda out: out.mul_(2).relu_().square().mean().sqrt(),
    ),
    "the loss writes one of two": (
        _two_in_one_memory,
        lambda outputs: (outputs[0].mul_(2) * outputs[1]).square().mean().sqrt(),
    ),
}


@EITHER
@pytest.mark.parametrize(("fn", "loss"), WRITTEN.values(), ids=WRITTEN)
def test_outputs_that_are_written_are_those_of_each_micro_batch(fn, loss, verify):
    net, x = small_net(), samples(16)
    compare(net, loss(fn(net, x)), partial(fn, net), x, loss=loss, maximum=4, verify=verify)


@EITHER
@pytest.mark.parametrize("view", [lambda out: out, torch.ravel])
def test_a_loss_that_writes_into_one_of_two_outputs_in_one_memory_is_refused(view, verify):
    net = small_net()

    def outputs(b):
        out = net(b)
        return {"out": out, "view": view(out).reshape(len(b), -1)}

    def loss(outputs):
        outputs["out"].add_(1)
        return (outputs["view"].square().mean()).sqrt()

    with pytest.raises(AdaptiveUsageError, match=r"written in place into .*out.*clone\(\)"):
        step(outputs, samples(16), loss=loss, maximum=4, verify=verify)
    assert all(each.grad is None for each in net.parameters())


@EITHER
def test_what_is_returned_beside_the_loss_in_one_memory_is_that_of_each_micro_batch(verify):
    net, held, x = small_net(), torch.zeros(16, 3, dtype=torch.float64), samples(16)

    array = numpy.zeros((16, 3))

    def fn(b):
        out, rows = net(b), array[: len(b)]
        rows[:] = out.detach().numpy()
        predicted = torch.mul(out.detach(), 1, out=held[: len(b)])
        return out.square().mean(), {"predicted": predicted, "rows": rows}

    aux = step(fn, x, maximum=6, has_aux=True, verify=verify).aux
    for name in ("predicted", "rows"):
        found = torch.cat([torch.as_tensor(each[name]) for each in aux])
        torch.testing.assert_close(found, net(x).detach())
