"""What a refused split says: both numbers, what to declare, and which module mixes samples."""

import pickle

import pytest
import torch
from torch import nn

from tenure.adaptive import SplitMismatchError, step

from ..step_cases import samples, small_net


def refused(fn, batch, **options):
    with pytest.raises(SplitMismatchError) as caught:
        step(fn, batch, maximum=4, **options)
    return caught.value


def test_the_error_tells_both_numbers_and_what_to_declare():
    net = small_net()

    def rooted(b):
        return net(b).square().mean().sqrt()

    error = refused(rooted, samples(16))
    assert str(error) == (
        "The batch of 16 has to be split into micro-batches of 4, and 'rooted' would give other "
        f"results then: the loss for 8 samples is {error.whole:.6g} in one piece and "
        f"{error.split:.6g} as 5 + 3 "
        f"({100 * abs(error.whole - error.split) / error.whole:.2g} % off). Nothing was changed. "
        'It is a function of a mean: return that without the root, and pass loss="mean", '
        "then=torch.sqrt."
    )
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error)
    assert (other.whole, other.split, other.advice) == (error.whole, error.split, error.advice)


ADVICE = {
    'pass loss="sum".': (lambda o, b, net: o.square().sum(), {}),
    'leave loss="sum" out.': (lambda o, b, net: o.square().mean(), {"loss": "sum"}),
    "weight=lambda batch: batch['mask'].sum()": (
        lambda o, b, net: o[b["mask"]].square().mean(),
        {},
    ),
    "leave weight= out.": (
        lambda o, b, net: o.square().mean(),
        {"weight": lambda b: b["mask"].sum()},
    ),
    "Pass a penalty on parameters as once=.": (
        lambda o, b, net: o.square().sum() + net[0].weight.square().sum(),
        {"loss": "sum"},
    ),
    'pass loss="sum", then=torch.log.': (lambda o, b, net: o.exp().sum().log(), {"loss": "sum"}),
    "then=torch.exp.": (lambda o, b, net: o.square().mean().exp(), {}),
    "pass what is computed of all of them as loss=": (lambda o, b, net: o.std(), {}),
    "do the rest in loss=, which gets all outputs.": (
        lambda o, b, net: o - o.mean(0),
        {"loss": lambda o: o.std()},
    ),
}


@pytest.mark.parametrize("advice", ADVICE)
def test_the_advice_is_what_makes_it_right(advice):
    loss, options = ADVICE[advice]
    net = small_net()
    batch = {"x": samples(16), "mask": torch.rand(16) > 0.5}
    assert advice in refused(lambda b: loss(net(b["x"]), b, net), batch, **options).advice


@pytest.mark.parametrize("is_module", [False, True])
def test_weights_of_classes_are_named_as_what_the_mean_divides_by(is_module):
    torch.manual_seed(0)
    net, w = nn.Linear(3, 4).double(), torch.tensor([0.1, 1.0, 5.0, 2.0]).double()
    x, y = torch.randn(32, 3, dtype=torch.float64), torch.arange(32) % 4
    criterion = nn.CrossEntropyLoss(weight=w)

    def by_module(batch):
        return criterion(net(batch[0]), batch[1])

    def by_function(batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1], weight=w)

    loss_of = by_module if is_module else by_function
    shown = refused(loss_of, (x, y)).advice.partition("weight=")[2].partition(" (with")[0]
    name = "criterion.weight" if is_module else "w"
    assert shown == f"lambda batch: {name}[batch[1]].sum()"
    step(loss_of, (x, y), maximum=4, weight=eval(shown, {"criterion": criterion, "w": w}))
    split = net.weight.grad.clone()
    net.zero_grad()
    loss_of((x, y)).backward()
    torch.testing.assert_close(split, net.weight.grad, rtol=1e-10, atol=1e-12)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_a_module_that_mixes_samples_is_named():
    net = nn.Sequential(nn.Linear(4, 8), Centred(), nn.Linear(8, 1))
    error = refused(lambda b: net(b).square().mean(), torch.randn(12, 4))
    assert "net.1 (Centred) mixes the samples" in error.advice


@pytest.mark.parametrize(
    "mix", [lambda b: 0.3 * b + 0.7 * b[torch.randperm(len(b))], lambda b: b - b.mean(0)]
)
def test_a_module_is_innocent_of_what_the_function_mixes_before_it(mix):
    net = small_net()
    advice = refused(lambda b: net(mix(b)).square().mean(), samples(12)).advice
    assert advice.startswith("Return the outputs, one for each sample")
    assert "Mix samples, as in mixup, before step()." in advice
