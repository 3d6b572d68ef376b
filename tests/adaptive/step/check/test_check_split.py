"""`check_split` finds what a split changes, says who, and leaves no trace."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import (
    AdaptiveUsageError,
    SplitDifference,
    SplitReport,
    check_split,
    memory_budget,
)

from ..step_cases import LOSSES, MODELS, made, n_valid, samples, small_net

_own = torch.Generator()


def _net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 3)).double()


def _x(n=20):
    return torch.randn(n, 4, dtype=torch.float64)


def names(report, kind):
    return [d.name for d in report.differences if d.kind == kind]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_that_step_takes_passes(loss):
    net, batch = made("MLP", 12, 0)
    case = LOSSES[loss]
    report = check_split(lambda b: case.fn(net(b["x"]), b["y"]), batch, **case.options)
    assert report.ok, str(report)
    assert report.sizes == (5, 3)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_passes(model):
    net, batch = made(model, 12, 0)
    assert check_split(lambda b: net(b["x"]).square().mean(), batch)


def test_a_loss_that_passes_is_told_in_one_line():
    net = _net(nn.Dropout(), nn.Dropout(0.2))
    report = check_split(lambda b: net(b).square().mean(), _x())
    assert bool(report)
    assert str(report) == (
        "8 samples as 5 + 3: the same loss, gradients and buffers as in one piece."
    )


def test_batchnorm_is_named_with_what_follows_from_it():
    net = _net(nn.BatchNorm1d(8))
    report = check_split(lambda b: net(b).square().mean(), _x())
    assert isinstance(report, SplitReport)
    assert not report
    assert report.differences[0].kind == "module"
    assert report.differences[0].name == "net.1 (BatchNorm1d)"
    assert names(report, "buffer") == [
        "net.1.running_mean (BatchNorm1d)",
        "net.1.running_var (BatchNorm1d)",
        "net.1.num_batches_tracked (BatchNorm1d)",
    ]
    assert "net.0.weight" in names(report, "gradient")
    assert "the module mixes the samples of its batch: freeze it" in str(report)


def test_a_module_of_ones_own_that_mixes_samples_is_named():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    net = _net(nn.Sequential(nn.Tanh(), Centred()))
    report = check_split(lambda b: net(b).square().mean(), _x())
    assert report.differences[0].name == "net.1.1 (Centred)"


def test_a_batch_coupled_loss_is_told_from_a_coupled_module():
    net = _net(nn.Tanh())
    report = check_split(lambda b: net(b).var(0).sum(), _x())
    assert not report.ok
    assert names(report, "module") == []
    assert names(report, "loss") == ["loss"]
    assert (
        names(report, "gradient")
        == [
            "net.0.weight",
            "net.0.bias",
            "net.2.weight",
            "net.2.bias",
        ][: len(names(report, "gradient"))]
    )
    assert "the loss itself mixes samples, or its weight is wrong: see weight=" in report.text(
        width=300
    )


def test_a_mean_over_other_things_than_samples_needs_its_weight():
    net, batch = made("MLP", 12, 0)
    batch["y"][:5] = torch.tensor([-100, 1, -100, 1, 2])
    batch["y"][5:8] = 3

    def fn(b):
        return F.cross_entropy(net(b["x"]), b["y"])

    assert not check_split(fn, batch)
    assert check_split(fn, batch, weight=n_valid)


def test_a_weight_that_is_of_one_term_alone_names_the_other_and_its_parameters():
    torch.manual_seed(0)
    a, b = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    batch = {"x": _x(8), "y": torch.tensor([1, 0, 0, 1, 1, 1, 0, 1])}

    def fn(batch):
        chosen = a(batch["x"])[batch["y"] == 1]
        return {"chosen": chosen.square().mean(), "all": b(batch["x"]).square().mean()}

    report = check_split(fn, batch, weight=lambda batch: 1)
    assert names(report, "term") == ["chosen", "all"]
    assert "a.weight" in names(report, "gradient")
    report = check_split(fn, batch)
    assert names(report, "term") == ["chosen"]
    assert set(names(report, "gradient")) <= {"a.weight", "a.bias"}


def test_a_penalty_in_a_sum_is_found_and_once_mends_it():
    net = _net(nn.Tanh())

    def penalty():
        return net[0].weight.square().sum()

    x = _x()
    assert not check_split(lambda b: net(b).sum() + penalty(), x, loss="sum")
    assert check_split(lambda b: net(b).sum(), x, loss="sum", once=penalty)


def test_tensors_of_the_batch_and_of_the_closure_are_named():
    x = _x(8).requires_grad_()
    scale = torch.ones(4, dtype=torch.float64, requires_grad=True)
    report = check_split(lambda b: (b["x"] * scale).exp().var(0).sum(), {"x": x})
    assert names(report, "gradient") == ["scale"] or "scale" in names(report, "gradient")


def python_noise(b):
    return torch.tensor([[random.random()] for _ in b])


def a_counter(b, calls=[]):  # noqa: B006
    calls.append(b)
    return len(calls)


@pytest.mark.parametrize("factor", [python_noise, a_counter])
def test_what_differs_between_two_runs_or_can_not_be_the_same_for_parts_is_told(factor):
    net = _net(nn.Tanh())
    report = check_split(lambda b: (net(b) * factor(b)).mean(), _x())
    assert [d.kind for d in report.differences] == ["random"]
    assert "no two runs agree, or Python or NumPy draws random numbers" in report.text(width=300)


def test_the_report_is_a_table():
    report = SplitReport(
        (5, 3),
        1e-9,
        (
            SplitDifference("module", "net.1 (BatchNorm1d)", 0.43),
            SplitDifference("gradient", "net.0.weight", 0.18),
        ),
    )
    assert report.text(width=300) == (
        "8 samples as 5 + 3: not the same as in one piece.\n"
        "what      rel. error  which\n"
        "module       4.3e-01  net.1 (BatchNorm1d)\n"
        "gradient     1.8e-01  net.0.weight\n"
        "That means: the module mixes the samples of its batch: freeze it, replace it, or keep the "
        "batch whole."
    )


def test_nothing_is_left_behind():
    net = _net(nn.BatchNorm1d(8), nn.Dropout(), nn.LSTM(8, 8, dropout=0.1, num_layers=2))
    net[0].weight.grad = prior = torch.ones(8, 4, dtype=torch.float64)
    buffers = [b.clone() for b in net.buffers()]
    modes = [m.training for m in net.modules()]
    x = _x()
    state = torch.get_rng_state()
    hooks = [len(m._forward_hooks) for m in net.modules()]
    check_split(lambda b: net[3](net[:3](b))[0].square().mean(), x, model=net)
    assert net[0].weight.grad is prior
    assert torch.equal(prior, torch.ones_like(prior))
    assert net[0].bias.grad is None
    assert all(torch.equal(a, b) for a, b in zip(buffers, net.buffers(), strict=True))
    assert modes == [m.training for m in net.modules()]
    assert net[3].dropout == 0.1
    assert torch.equal(state, torch.get_rng_state())
    assert hooks == [len(m._forward_hooks) for m in net.modules()]


def test_the_number_of_samples_and_the_tolerance_can_be_chosen():
    net = _net(nn.Tanh()).float()
    seen = []

    def fn(b):
        seen.append(len(b))
        return net(b).square().mean() * (1 + 1e-3 * (len(b) == 2))

    x = _x().float()
    report = check_split(fn, x, n_samples=7)
    assert (report.sizes, report.rtol, report.ok) == ((5, 2), 1e-4, False)
    assert max(seen) == 7
    assert check_split(fn, x, n_samples=7, rtol=0.1)
    report = check_split(fn, x)
    assert (report.sizes, report.ok) == ((5, 3), True)


@pytest.mark.parametrize(
    ("n_samples", "sizes"), [(2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (5, (3, 2)), (6, (4, 2))]
)
def test_few_samples_are_compared_in_parts_too(n_samples, sizes):
    net = _net(nn.Tanh())
    seen = []

    def fn(b):
        seen.append(len(b))
        return net(b).square().mean()

    report = check_split(fn, _x(n_samples))
    assert (report.sizes, report.ok) == (sizes, True)
    assert seen == [n_samples, *sizes]
    mixed = check_split(lambda b: net(b).logsumexp(0).sum(), _x(n_samples))
    assert names(mixed, "loss") == ["loss"]


@pytest.mark.parametrize(("n_samples", "sizes"), [(4, (2, 2)), (5, (3, 2))])
def test_batchnorm_on_few_samples_is_named_too(n_samples, sizes):
    net = _net(nn.BatchNorm1d(8))
    report = check_split(lambda b: net(b).square().mean(), _x(n_samples))
    assert report.sizes == sizes
    assert names(report, "module") == ["net.1 (BatchNorm1d)"]


def test_the_number_of_samples_may_be_of_numpy():
    np = pytest.importorskip("numpy")
    net = _net(nn.Tanh())
    assert check_split(lambda b: net(b).mean(), _x(), n_samples=np.int64(6)).sizes == (4, 2)


def test_a_number_of_samples_that_is_none_is_refused():
    with pytest.raises(
        AdaptiveUsageError, match=r"n_samples=0 is not a size\. Give a whole number"
    ):
        check_split(lambda b: b.mean(), _x(), n_samples=0)


def test_a_single_sample_can_not_be_split():
    net = _net(nn.Tanh())
    with pytest.raises(
        AdaptiveUsageError, match=r"got 1 sample\(s\), and a split needs 2 at least"
    ):
        check_split(lambda b: net(b).mean(), _x(1))


@pytest.mark.parametrize("n_samples", [2, 3])
def test_too_few_samples_for_statistics_of_each_part_are_refused_with_the_module(n_samples):
    net = _net(nn.BatchNorm1d(8))
    with pytest.raises(
        AdaptiveUsageError,
        match=rf"got {n_samples} sample\(s\), and a split needs 4 at least, 2 in each part for "
        r"net\.1 \(BatchNorm1d, training with",
    ):
        check_split(lambda b: net(b).mean(), _x(n_samples))


def test_bfloat16_is_compared_coarsely():
    net = _net(nn.Tanh()).bfloat16()
    assert check_split(lambda b: net(b).square().mean(), _x().bfloat16())


def test_a_batch_that_was_computed_keeps_its_graph():
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = _x(8) @ weight
    net = _net(nn.Tanh())
    assert check_split(lambda b: net(b).square().mean(), x)
    assert weight.grad is None
    x.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("is_leaf", [True, False])
def test_the_gradient_of_a_batch_is_compared_under_its_name(is_leaf):
    x = _x(8).requires_grad_()
    x = x if is_leaf else x * 1.0
    report = check_split(lambda b: (b["x"] - b["x"].mean(0)).exp().mean(), {"x": x})
    assert names(report, "gradient") == ["batch['x']"]
    assert x.is_leaf == is_leaf
    if is_leaf:
        assert x.grad is None


@pytest.mark.parametrize("turn", [0, 1])
def test_leaves_without_a_name_are_told_apart(turn):
    scales = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    hidden = iter(scales * 9)

    def fn(b):
        drawn = [next(hidden), next(hidden)]
        return (b * drawn[turn]).mean() + (b * drawn[1 - turn]).exp().var(0).sum()

    assert len(names(check_split(fn, _x(8)), "gradient")) == 1


def test_random_numbers_are_as_before_for_every_generator():
    numpy = pytest.importorskip("numpy")
    net = _net(nn.Tanh())
    own, x = torch.Generator().manual_seed(3), _x(8)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    assert check_split(lambda b: net(b).mean() + 0 * torch.rand(1, generator=own).sum(), x)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert own.initial_seed() == 3
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


DRAWS = {
    "torch": lambda b: torch.rand(1).double(),
    "own": lambda b: torch.rand(1, generator=_own).double(),
    "dropout": lambda b: F.dropout(torch.ones(len(b), 1).double()),
    "noise": lambda b: torch.randn(len(b), 1).double(),
    "python": lambda b: torch.tensor(random.random()),
    "numpy": lambda b: torch.tensor(float(__import__("numpy").random.rand())),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_are_the_same_for_the_whole_and_for_parts(draw):
    net = _net(nn.Tanh())

    def fn(b):
        return (net(b) * DRAWS[draw](b)).square().mean()

    assert check_split(fn, _x(8)).ok
    report = check_split(lambda b: fn(b).sqrt(), _x(8))
    assert {d.kind for d in report.differences} == {"loss", "gradient"} or draw in (
        "python", "numpy",
    )  # fmt: skip
    assert not report.ok


def test_a_module_whose_chunks_alone_give_nan_is_named():
    class Spread(nn.Module):
        def forward(self, x):
            return x / (len(x) != 3)

    net = _net(Spread(), nn.Tanh())
    x = torch.ones(8, 4, dtype=torch.float64)
    net[0].weight.data.zero_()
    net[0].bias.data.zero_()
    report = check_split(lambda b: net(b).square().mean(), x)
    assert names(report, "module") == ["net.1 (Spread)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "max"}, r"check_split\(\) got loss='max'"),
        ({"model": 3}, r"check_split\(\) got a int as model="),
    ],
)
def test_errors_name_check_split(options, message):
    with pytest.raises(AdaptiveUsageError, match=message):
        check_split(lambda b: b.mean(), _x(8), **options)


def test_an_error_of_the_function_holds_no_copies_of_buffers():
    net = _net(nn.BatchNorm1d(8))
    net.register_buffer("large", torch.zeros(1 << 20))

    def fn(b):
        raise ValueError("of the function")

    with memory_budget("64MiB") as budget:
        with pytest.raises(ValueError, match="of the function") as kept:
            check_split(lambda b: fn(net(b)), _x(8))
        assert budget.live_bytes < 1 << 20
    assert kept


def test_a_sum_is_told_to_be_declared():
    net, x = _net(), _x(8)
    report = check_split(lambda b: net(b).square().sum(), x)
    assert not report.ok
    assert report.advice == 'It is a sum over samples, not a mean: pass loss="sum".'
    assert str(report).endswith(f"That means: {report.advice}")
    assert check_split(lambda b: net(b).square().sum(), x, loss="sum").advice is None
    report = check_split(lambda b: net(b).square().sum().sqrt(), x)
    assert report.advice.endswith('pass loss="sum", then=torch.sqrt.')
    # none that would not help
    assert check_split(lambda b: net(b).std(), x).advice is None


def test_what_is_added_once_is_no_part_of_the_advice():
    net, x = _net(), _x(8)

    def penalty():
        return net[0].weight.square().sum()

    report = check_split(lambda b: net(b).square().sum(), x, once=penalty)
    assert report.advice == 'It is a sum over samples, not a mean: pass loss="sum".'


class CentresBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu_(self.first(x))
        return self.second(hidden - hidden.mean(0))


def test_a_module_is_innocent_of_what_is_mixed_before_it():
    net, x = CentresBetween().double(), torch.randn(8, 4, dtype=torch.float64)
    report = check_split(lambda b: net(b).square().mean(), x)
    assert report.differences[0].name == "net (CentresBetween)"
    report = check_split(lambda b: net.second(net.first(b - b.mean(0))).square().mean(), x)
    assert {each.kind for each in report.differences} == {"loss", "gradient"}


def test_a_leaf_that_the_function_makes_itself_is_no_difference():
    net, x = _net(), _x(8)

    def of_rows(batch):
        rows = batch * 1
        # as models do before a checkpoint of their first layer
        return net(rows.detach().requires_grad_()).square().mean()

    def of_all(batch):
        shift = torch.zeros(4, dtype=batch.dtype, requires_grad=True)
        return net(batch + shift).square().mean()

    assert check_split(of_rows, x).ok
    assert check_split(of_all, x).ok
    assert not check_split(lambda b: of_all(b) * net(b).std(), x).ok


def test_a_captured_leaf_without_a_name_is_compared():
    net, x = _net(), _x(8)
    held = [torch.ones(3, dtype=torch.float64, requires_grad=True)]

    def fn(batch, get=lambda: held[0]):
        out = net(batch) * get()
        return out.square().mean() + out.sum(0).mul(get()).sum().sigmoid()

    report = check_split(fn, x)
    assert any("shape [3]" in each.name or "held" in each.name for each in report.differences)


def test_a_pair_that_makes_no_mean_is_reported():
    net, x = _net(), _x(8)
    report = check_split(lambda b: (net(b).square().sum(), len(b) + 0.5), x)
    assert report.differences
    assert report.advice is None


def test_each_run_finds_the_batch_without_grad_although_the_one_before_let_it_require_grad():
    net, x, seen = small_net(), samples(8), []

    def penalized(b):
        seen.append(b.requires_grad)
        b.requires_grad_()
        (slope,) = torch.autograd.grad(net(b).sum(), b, create_graph=True)
        return slope.square().sum(1).mean()

    assert check_split(penalized, x).ok
    assert len(seen) == 3
    assert not any(seen)
    assert not x.requires_grad
