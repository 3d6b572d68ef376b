"""`check_split` finds what a split changes, says who, and leaves no trace."""

import random

import numpy
import pytest
import torch
from torch import nn

from tenure.adaptive import (
    AdaptiveUsageError,
    SplitDifference,
    SplitMismatchError,
    SplitReport,
    check_split,
    step,
)

from ..unchanged import unchanged
from .step_cases import samples, squares


def _net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 3)).double()


def names(report, kind):
    return [d.name for d in report.differences if d.kind == kind]


def test_a_loss_that_passes_is_told_in_one_line_and_one_that_does_not_in_a_table():
    report = check_split(squares(_net(nn.Dropout(), nn.Dropout(0.2))), samples(8))
    assert bool(report)
    assert str(report) == (
        "8 samples as 5 + 3: the same loss, gradients and buffers as in one piece."
    )
    assert check_split(squares(_net(nn.Tanh()).bfloat16()), samples(8).bfloat16())
    module = SplitDifference("module", "net.1 (BatchNorm1d)", 0.43)
    report = SplitReport((5, 3), 1e-9, (module, SplitDifference("gradient", "net.0.weight", 0.18)))
    assert report.text(width=300) == (
        "8 samples as 5 + 3: not the same as in one piece.\n"
        "what      rel. error  which\n"
        "module       4.3e-01  net.1 (BatchNorm1d)\n"
        "gradient     1.8e-01  net.0.weight\n"
        "That means: the module mixes the samples of its batch: freeze it, replace it, or keep the "
        "batch whole."
    )


class Centred(nn.Module):
    def forward(self, x):
        # written in place by the next one
        return torch.relu_(x - x.mean(0))


class Spread(nn.Module):
    """Gives nan for some chunks alone."""

    def forward(self, x):
        return x / (len(x) != 3)


@pytest.mark.parametrize("own", [Centred, Spread])
def test_a_module_of_ones_own_that_mixes_samples_is_named(own):
    report = check_split(squares(_net(nn.Sequential(nn.Tanh(), own()))), samples(8))
    assert report.differences[0].name == f"net.1.1 ({own.__name__})"


def test_batchnorm_is_named_with_what_follows_from_it():
    report = check_split(squares(_net(nn.BatchNorm1d(8))), samples(8))
    assert not report
    assert report.differences[0].kind == "module"
    assert report.differences[0].name == "net.1 (BatchNorm1d)"
    assert names(report, "buffer") == [
        "net.1.running_mean (BatchNorm1d)",
        "net.1.running_var (BatchNorm1d)",
        "net.1.num_batches_tracked (BatchNorm1d)",
    ]
    assert "net.0.weight" in names(report, "gradient")


def test_a_batch_coupled_loss_is_told_from_a_coupled_module():
    net = _net(nn.Tanh())
    report = check_split(lambda b: net(b).var(0).sum(), samples(8))
    assert not report.ok
    assert names(report, "module") == []
    assert names(report, "loss") == ["loss"]
    found = names(report, "gradient")
    assert found == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"][: len(found)]
    told = "the loss itself mixes samples, or its weight is wrong: see weight="
    assert told in report.text(width=300)


def test_a_weight_that_is_of_one_term_alone_names_the_other_and_its_parameters():
    torch.manual_seed(0)
    a, b = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    batch = {"x": samples(8), "y": torch.tensor([1, 0, 0, 1, 1, 1, 0, 1])}

    def fn(batch):
        chosen = a(batch["x"])[batch["y"] == 1]
        return {"chosen": chosen.square().mean(), "all": b(batch["x"]).square().mean()}

    report = check_split(fn, batch, weight=lambda batch: 1)
    assert names(report, "term") == ["chosen", "all"]
    assert "a.weight" in names(report, "gradient")
    report = check_split(fn, batch)
    assert names(report, "term") == ["chosen"]
    assert set(names(report, "gradient")) <= {"a.weight", "a.bias"}


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_the_batch_and_of_the_closure_are_compared_under_their_names(is_leaf):
    x = samples(8).requires_grad_()
    batch = {"x": x if is_leaf else x * 1.0}
    scale = torch.ones(4, dtype=torch.float64, requires_grad=True)
    report = check_split(lambda b: (b["x"] * scale - b["x"].mean(0)).exp().mean(), batch)
    assert {*names(report, "gradient")} == {"batch['x']", "scale"}
    assert x.grad is scale.grad is None
    batch["x"].sum().backward()
    assert x.grad is not None


def a_counter(b, calls=[]):  # noqa: B006
    calls.append(b)
    return len(calls)


@pytest.mark.parametrize(
    "factor", [lambda b: torch.tensor([[random.random()] for _ in b]), a_counter]
)
def test_what_differs_between_two_runs_or_can_not_be_the_same_for_parts_is_told(factor):
    net = _net(nn.Tanh())
    report = check_split(lambda b: (net(b) * factor(b)).mean(), samples(8))
    assert [d.kind for d in report.differences] == ["random"]
    assert "no two runs agree, or Python or NumPy draws random numbers" in report.text(width=300)


def test_nothing_is_left_behind():
    net = _net(nn.BatchNorm1d(8), nn.Dropout(), nn.LSTM(8, 8, dropout=0.1, num_layers=2))
    net[0].weight.grad = torch.ones(8, 4, dtype=torch.float64)
    own = torch.Generator().manual_seed(3)

    def fn(b):
        return net[3](net[:3](b))[0].square().mean() + 0 * torch.rand(1, generator=own).sum()

    x = samples(8)
    with unchanged(net):
        check_split(fn, x, model=net)
    assert net[3].dropout == 0.1
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


def test_the_number_of_samples_and_the_tolerance_can_be_chosen():
    net, seen = _net(nn.Tanh()).float(), []

    def fn(b):
        seen.append(len(b))
        return net(b).square().mean() * (1 + 1e-3 * (len(b) == 2))

    x = samples(20).float()
    report = check_split(fn, x, n_samples=numpy.int64(7))
    assert (report.sizes, report.rtol, report.ok) == ((5, 2), 1e-4, False)
    assert max(seen) == 7
    assert check_split(fn, x, n_samples=7, rtol=0.1)
    report = check_split(fn, x)
    assert (report.sizes, report.ok) == ((5, 3), True)


@pytest.mark.parametrize(("n_samples", "sizes"), [(2, (1, 1)), (3, (2, 1)), (4, (2, 2))])
def test_few_samples_are_compared_in_parts_too(n_samples, sizes):
    net, x = _net(nn.Tanh()), samples(n_samples)
    report = check_split(squares(net), x)
    assert (report.sizes, report.ok) == (sizes, True)
    assert names(check_split(lambda b: net(b).logsumexp(0).sum(), x), "loss") == ["loss"]
    normed = squares(_net(nn.BatchNorm1d(8)))
    if n_samples < 4:
        needed = rf"got {n_samples} sample\(s\), and a split needs 4 at least, 2 in each part for "
        with pytest.raises(AdaptiveUsageError, match=rf"{needed}net\.1 \(BatchNorm1d, training"):
            check_split(normed, x)
    else:
        assert names(check_split(normed, x), "module") == ["net.1 (BatchNorm1d)"]


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (8, {"n_samples": 0}, r"n_samples=0 is not a size\. Give a whole number"),
        (1, {}, r"got 1 sample\(s\), and a split needs 2 at least"),
        (8, {"loss": "max"}, r"check_split\(\) got loss='max'"),
        (8, {"model": 3}, r"check_split\(\) got a int as model="),
    ],
)
def test_what_can_not_be_checked_is_refused(n, options, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        check_split(lambda b: b.mean(), samples(n), **options)


IS_SUM = 'It is a sum over samples, not a mean: pass loss="sum".'


def test_the_advice_is_what_helps_or_none():
    net, x = _net(), samples(8)
    report = check_split(lambda b: net(b).square().sum(), x)
    assert str(report).endswith(f"That means: {report.advice}")
    assert check_split(lambda b: net(b).square().sum(), x, loss="sum").advice is None
    # what is added once is no part of it
    penalized = check_split(
        lambda b: net(b).square().sum(), x, once=lambda: net[0].weight.square().sum()
    )
    assert report.advice == penalized.advice == IS_SUM
    report = check_split(lambda b: net(b).square().sum().sqrt(), x)
    assert report.advice.endswith('pass loss="sum", then=torch.sqrt.')
    assert check_split(lambda b: net(b).std(), x).advice is None
    report = check_split(lambda b: (net(b).square().sum(), len(b) + 0.5), x)
    assert report.differences
    assert report.advice is None


def test_advice_is_tried_without_calling_eval_of_a_layer():
    class Merging(nn.Linear):
        """Takes its inputs from their mean, and merges weights in eval() as layers of LoRA do."""

        def train(self, mode=True):
            self.weight.data.mul_(1 if mode else 2)
            return super().train(mode)

        def forward(self, x):
            return super().forward(x - x.mean(0) if self.training else x)

    torch.manual_seed(0)
    net, x = nn.Sequential(Merging(4, 3)).double(), samples(8)
    with unchanged(net), pytest.raises(SplitMismatchError, match=r"freeze it with eval\(\), or"):
        step(lambda b: net(b).exp().mean(), x, maximum=4)


def test_a_leaf_that_the_function_makes_itself_is_no_difference():
    net, x = _net(), samples(8)

    def of_rows(batch):
        # as models do before a checkpoint of their first layer
        return net((batch * 1).detach().requires_grad_()).square().mean()

    def of_all(batch):
        shift = torch.zeros(4, dtype=batch.dtype, requires_grad=True)
        return net(batch + shift).square().mean()

    assert check_split(of_rows, x).ok
    assert check_split(of_all, x).ok
    assert not check_split(lambda b: of_all(b) * net(b).std(), x).ok


def test_each_run_finds_the_batch_without_grad_although_the_one_before_let_it_require_grad():
    net, x, seen = _net(), samples(8), []

    def penalized(b):
        seen.append(b.requires_grad)
        b.requires_grad_()
        (slope,) = torch.autograd.grad(net(b).sum(), b, create_graph=True)
        return slope.square().sum(1).mean()

    assert check_split(penalized, x).ok
    assert seen == [False] * 3
    assert not x.requires_grad
