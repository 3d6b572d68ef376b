"""Gradients and values of losses, whole and in micro-batches, are those of plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import BatchCoupledError, OutOfRetriesError, lazy, memory_budget, reset

from .programs import RoomFor, assert_same_gradients, batch, mlp

pytestmark = pytest.mark.usefixtures("forgetful")
ROOMS = pytest.mark.parametrize("room", [None, 3])
WEIGHTS = torch.tensor([0.2, 1.0, 2.5], dtype=torch.float64)


def _ignored(y):
    # all valid labels on one side, so that parts have none
    return torch.where(torch.arange(len(y)) < 5, torch.tensor(-100), y)


def _balanced(a, b):
    with torch.no_grad():
        share = a / b
    return a + share * b


def _cross_entropy(**options):
    return lambda out, x, y: F.cross_entropy(out, y, **options)


def _by_its_value(loss):
    return loss * loss.detach()


def _by_a_comparison(loss):
    return torch.where(loss > 0.01, 3 * loss, loss)


def _each(out, y):
    return F.cross_entropy(out, y, reduction="none")


LOSSES = {
    "cross_entropy": _cross_entropy(),
    "sum": _cross_entropy(reduction="sum"),
    # parts of classes without weight, whose mean is that of nothing
    "classes without weight": lambda out, x, y: F.cross_entropy(
        out, torch.arange(len(y)) // 4, weight=WEIGHTS.new_tensor([0.0, 1.0, 2.5])
    ),
    "label smoothing": _cross_entropy(weight=WEIGHTS, label_smoothing=0.1),
    "ignored and weights": lambda out, x, y: F.cross_entropy(out, _ignored(y), weight=WEIGHTS),
    "nll": lambda out, x, y: F.nll_loss(F.log_softmax(out, 1), y, weight=WEIGHTS),
    "probabilities": lambda out, x, y: F.cross_entropy(out, F.one_hot(y, 3).double() * 0.9),
    # not linear in its terms: two passes
    "probabilities, clamped": lambda out, x, y: F.cross_entropy(
        out, F.one_hot(y, 3).double() * 0.9
    ).clamp(max=100),
    "kl": lambda out, x, y: F.kl_div(
        F.log_softmax(out, 1), F.softmax(x[:, :3], 1), reduction="batchmean"
    ),
    "two terms": lambda out, x, y: F.cross_entropy(out, _ignored(y)) + 0.1 * out.pow(2).mean(),
    "over what parts have counted": lambda out, x, y: (
        (_each(out, y) * (out.detach() > 0).any(1)).sum() / (out.detach() > 0).any(1).sum()
    ),
    "two terms, one weighted without a graph": lambda out, x, y: _balanced(
        F.cross_entropy(out, y), out.pow(2).mean()
    ),
    "two terms, one weighted by whole numbers": lambda out, x, y: (
        F.cross_entropy(out, y) * ((out + 9).abs().mean() * 10).to(torch.int64)
    ),
    "added in place": lambda out, x, y: F.cross_entropy(out, y).add_(out.pow(2).mean()),
    "by hand": lambda out, x, y: (_each(out, y) * (y > 0)).sum() / (y > 0).sum(),
    "by the number of samples": lambda out, x, y: (_each(out, y) / x.size(0)).sum(),
    "by the length of the batch": lambda out, x, y: _each(out, y).sum() / len(x),
    "root": lambda out, x, y: out.pow(2).mean().sqrt(),
    "product of terms": lambda out, x, y: F.cross_entropy(out, y) * out.pow(2).sum(),
    "contrastive": lambda out, x, y: F.cross_entropy(out @ out.T, torch.arange(len(y))),
    "deviation": lambda out, x, y: out.std().reshape(1),
    "softmax over samples": lambda out, x, y: F.cross_entropy(out.softmax(0), y),
    "of some samples": lambda out, x, y: F.cross_entropy(out[y > 0], y[y > 0]),
    "of a slice": lambda out, x, y: out[:3].pow(2).sum(),
    "in rows": lambda out, x, y: F.cross_entropy(out.view(x.size(0), -1), y.view(-1)),
    "by its own value": lambda out, x, y: _by_its_value(out.pow(2).mean()),
    "weighted by another's value": lambda out, x, y: (
        F.cross_entropy(out, y) * (-out.pow(2).mean().detach()).exp() + out.abs().mean()
    ),
    "by a comparison": lambda out, x, y: _by_a_comparison(out.pow(2).mean()),
    "the larger term": lambda out, x, y: torch.maximum(out.pow(2).mean(), out.abs().mean()),
}


@ROOMS
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_and_loss_are_those_of_plain_tensors(loss, room):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        torch.manual_seed(5)
        a, b = wrap(x, y)
        value = loss(model(a), a, b)
        value.backward()
        assert tuple(value.detach().numpy().shape) == tuple(value.shape)
        return value.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("room", [8, 4, 2])
def test_a_single_sample_that_is_left_over_is_a_batch_too(room):
    model, (x, y) = mlp(), batch(9)

    def program(wrap):
        loss = F.cross_entropy(model(wrap(x)).squeeze(), wrap(y))
        loss.backward()
        return loss.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-12)


@ROOMS
@pytest.mark.parametrize("takes_root", [True, False])
def test_a_number_for_a_log_is_that_of_the_line_that_made_it(takes_root, room):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        a, b = wrap(x, y)
        out = model(a)
        loss = F.cross_entropy(out, b)
        log = loss * 2
        loss += out.pow(2).mean()
        loss = loss.sqrt() if takes_root else loss
        loss.backward()
        return [loss.item(), log.item()]

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-12)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = mlp(), nn.BatchNorm1d(4).double().requires_grad_(False)
        self.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))


@ROOMS
def test_a_factor_of_the_batch_alone_is_computed_once_and_one_that_is_trained_is(room):
    model, (x, y) = Scaled(), batch()

    def program(wrap):
        model.norm.reset_running_stats()
        a, b = wrap(x, y)
        torch.manual_seed(5)
        scale = F.dropout(model.norm(a)).abs().mean()
        penalty = 0.1 * model.net[0].weight.square().sum()
        loss = F.cross_entropy(model.net(a), b) * scale * model.factor + penalty
        loss.backward()
        return loss.item(), model.norm.running_mean.tolist(), int(model.norm.num_batches_tracked)

    (loss, *expected), found = assert_same_gradients(model, program, room)
    assert found[0] == pytest.approx(loss, rel=1e-12)
    assert found[1] == pytest.approx(expected[0])
    assert found[2] == expected[1] == 1


INPUTS = {
    "normalized by the batch": lambda x: (x - x.mean(0)) / x.std(0),
    "mixed up": lambda x: 0.3 * x + 0.7 * x[torch.randperm(len(x))],
    "twice": lambda x: torch.cat([x, -x]),
    "noise": lambda x: x + 0 * torch.randn_like(x),
}


@ROOMS
@pytest.mark.parametrize("prepare", INPUTS.values(), ids=INPUTS)
def test_what_is_made_of_the_batch_alone_may_mix_its_samples(prepare, room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        torch.manual_seed(5)
        model(prepare(wrap(x.clone()))).square().mean().backward()

    # a doubled batch is a product of twice the rows
    assert_same_gradients(model, program, room and 7)


@pytest.mark.parametrize("flat", [False, True])
def test_labels_and_masks_that_are_plain_are_cut_with_the_batch(flat):
    model, (x, _) = mlp(n_out=6), batch()
    y, mask = torch.randint(0, 3, (8, 2)), torch.rand(8, 6) > 0.5

    def program(wrap):
        out = model(wrap(x)).masked_fill(mask, -1.0).view(8, 2, 3)
        out, labels = (out.reshape(-1, 3), y.view(-1)) if flat else (out.transpose(1, 2), y)
        F.cross_entropy(out, labels).backward()

    assert_same_gradients(model, program, 3)


def test_a_call_in_the_middle_that_mixes_samples_is_named_where_the_rest_does_not_fit():
    """What comes before it runs in micro-batches; what comes after it does not."""
    net, x = nn.Linear(4, 1024), torch.randn(512, 4)
    y = torch.zeros(512, dtype=torch.long)

    def normalized(out):
        return F.batch_norm(out, None, None, training=True)

    with (
        memory_budget("3MiB"),
        pytest.raises(
            BatchCoupledError, match=r"batch_norm\(\) at .*test_losses.py:\d+ wants all s"
        ) as caught,
    ):
        F.cross_entropy(normalized(net(lazy(x))), y).backward()
    assert "step() " not in str(caught.value)
    assert "loss= gets" not in str(caught.value)
    assert caught.value.names[0].startswith("batch_norm() at")
    assert all(p.grad is None for p in net.parameters())


def test_results_that_do_not_fit_say_so():
    net, x = nn.Linear(4, 1024), torch.randn(1024, 4)
    with (
        memory_budget("2MiB"),
        pytest.raises(
            OutOfRetriesError, match=r"results do not fit: float32\[1024, 1024\].*4\.0 MiB"
        ),
        torch.no_grad(),
    ):
        net(lazy(x)).softmax(1).numpy()
    with memory_budget("7MiB"):
        # one that has a name
        hidden = net(lazy(x))
        with pytest.raises(
            OutOfRetriesError, match=r"[Rr]esults .*: float32\[1024, 1024\], .* \(4.0 MiB"
        ):
            hidden.square().mean().backward()
    assert all(p.grad is None for p in net.parameters())


def test_the_first_of_two_passes_keeps_no_graph():
    """What was recorded with gradients on runs without, where whoever runs it wants none."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 1024), nn.Tanh(), nn.Linear(1024, 4)), torch.randn(1024, 4)
    net(x).std(0).sum().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    with memory_budget("3MiB"):
        net(lazy(x)).std(0).sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)


def test_what_does_not_fit_sample_by_sample_says_so():
    model, (x, _) = mlp(), batch()
    # its calls are known from then on
    with RoomFor(3):
        model(lazy(x)).sum().backward()
    model.zero_grad()
    reset()
    with RoomFor(0), pytest.raises(OutOfRetriesError, match="micro-batch 8"):
        model(lazy(x)).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_dropout_drops_after_a_call_that_dropped_nothing():
    drop, x = nn.Dropout(0.0), torch.ones(64, 4, dtype=torch.float64)
    assert (drop(lazy(x)) == 0).sum().item() == 0
    drop.p = 0.5
    assert 0.2 < (drop(lazy(x)) == 0).double().mean().item() < 0.8
