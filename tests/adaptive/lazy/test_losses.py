"""Gradients and values of losses, whole and in micro-batches, are those of plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import BatchCoupledError, OutOfRetriesError, lazy, memory_budget, reset

from .programs import RoomFor, assert_same_gradients, batch, mlp

pytestmark = pytest.mark.usefixtures("forgetful")
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


LOSSES = {
    "cross_entropy": _cross_entropy(),
    "sum": _cross_entropy(reduction="sum"),
    "none, then mean": lambda out, x, y: F.cross_entropy(out, y, reduction="none").mean(),
    "class weights": _cross_entropy(weight=WEIGHTS),
    # parts of classes without weight, whose mean is that of nothing
    "classes without weight": lambda out, x, y: F.cross_entropy(
        out, torch.arange(len(y)) // 4, weight=WEIGHTS.new_tensor([0.0, 1.0, 2.5])
    ),
    "label smoothing": _cross_entropy(weight=WEIGHTS, label_smoothing=0.1),
    "ignored": lambda out, x, y: F.cross_entropy(out, _ignored(y)),
    "ignored and weights": lambda out, x, y: F.cross_entropy(out, _ignored(y), weight=WEIGHTS),
    "nll": lambda out, x, y: F.nll_loss(F.log_softmax(out, 1), y, weight=WEIGHTS),
    "probabilities": lambda out, x, y: F.cross_entropy(out, F.one_hot(y, 3).double() * 0.9),
    # not linear in its terms: two passes
    "probabilities, clamped": lambda out, x, y: F.cross_entropy(
        out, F.one_hot(y, 3).double() * 0.9
    ).clamp(max=100),
    "mse": lambda out, x, y: F.mse_loss(out, F.one_hot(y, 3).double()),
    "mse, weighted": lambda out, x, y: F.mse_loss(
        out, F.one_hot(y, 3).double(), weight=torch.rand(8, 1, dtype=torch.float64).expand(8, 3)
    ),
    "l1": lambda out, x, y: F.l1_loss(out[:, 0], x[:, 0]),
    "smooth_l1 sum": lambda out, x, y: F.smooth_l1_loss(out[:, 0], x[:, 0], reduction="sum"),
    "huber": lambda out, x, y: F.huber_loss(out[:, 0], x[:, 0]),
    "bce": lambda out, x, y: F.binary_cross_entropy(out.sigmoid(), F.one_hot(y, 3).double()),
    "bce logits": lambda out, x, y: F.binary_cross_entropy_with_logits(
        out, F.one_hot(y, 3).double(), pos_weight=WEIGHTS
    ),
    "kl": lambda out, x, y: F.kl_div(
        F.log_softmax(out, 1), F.softmax(x[:, :3], 1), reduction="batchmean"
    ),
    "mean": lambda out, x, y: out.square().mean(),
    "scaled": lambda out, x, y: F.cross_entropy(out, y) / 4,
    "two terms": lambda out, x, y: F.cross_entropy(out, _ignored(y)) + 0.1 * out.pow(2).mean(),
    "over what parts have counted": lambda out, x, y: (
        (F.cross_entropy(out, y, reduction="none") * (out.detach() > 0).any(1)).sum()
        / (out.detach() > 0).any(1).sum()
    ),
    "two terms, one weighted without a graph": lambda out, x, y: _balanced(
        F.cross_entropy(out, y), out.pow(2).mean()
    ),
    "two terms, one weighted by whole numbers": lambda out, x, y: (
        F.cross_entropy(out, y) * ((out + 9).abs().mean() * 10).to(torch.int64)
    ),
    "mean and sum": lambda out, x, y: F.cross_entropy(out, y) + out.abs().sum() / 7,
    "added in place": lambda out, x, y: F.cross_entropy(out, y).add_(out.pow(2).mean()),
    "sum of a list": lambda out, x, y: sum([F.cross_entropy(out, y), out.mean(), 3.0]),
    "by hand": lambda out, x, y: (
        (F.cross_entropy(out, y, reduction="none") * (y > 0)).sum() / (y > 0).sum()
    ),
    "by the number of samples": lambda out, x, y: (
        F.cross_entropy(out, y, reduction="none") / x.size(0)
    ).sum(),
    "root": lambda out, x, y: out.pow(2).mean().sqrt(),
    "product of terms": lambda out, x, y: F.cross_entropy(out, y) * out.pow(2).sum(),
    "square of a sum": lambda out, x, y: out.sum() ** 2,
    "contrastive": lambda out, x, y: F.cross_entropy(out @ out.T, torch.arange(len(y))),
    "deviation": lambda out, x, y: out.std(0).sum(),
    "log-sum-exp": lambda out, x, y: torch.logsumexp(out.flatten(), 0),
    "softmax over samples": lambda out, x, y: F.cross_entropy(out.softmax(0), y),
    "of some samples": lambda out, x, y: F.cross_entropy(out[y > 0], y[y > 0]),
    "of a slice": lambda out, x, y: out[:3].pow(2).sum(),
    "in rows": lambda out, x, y: F.cross_entropy(out.view(x.size(0), -1), y.view(-1)),
    "of one sample at a time": lambda out, x, y: torch.stack(
        [F.cross_entropy(a, b) for a, b in zip(out, y, strict=True)]
    ).mean(),
    "detached": lambda out, x, y: (out * out.detach().exp()).mean(),
    "squeezed": lambda out, x, y: out[:, :1].squeeze().square().mean(),
    "by its own value": lambda out, x, y: _by_its_value(out.pow(2).mean()),
    "weighted by another's value": lambda out, x, y: (
        F.cross_entropy(out, y) * (-out.pow(2).mean().detach()).exp() + out.abs().mean()
    ),
    "over its own value": lambda out, x, y: _over_its_value(out.pow(2).mean()),
    "many terms": lambda out, x, y: (
        F.cross_entropy(out, _ignored(y), weight=WEIGHTS) / 2 + out.abs().mean() - 3 * out.sum()
    ),
    "by a comparison": lambda out, x, y: _by_a_comparison(out.pow(2).mean()),
    "the larger term": lambda out, x, y: torch.maximum(out.pow(2).mean(), out.abs().mean()),
}


def _by_its_value(loss):
    return loss * loss.detach()


def _over_its_value(loss):
    return loss / loss.detach()


def _by_a_comparison(loss):
    return torch.where(loss > 0.01, 3 * loss, loss)


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_and_loss_are_those_of_plain_tensors(loss, room):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        torch.manual_seed(5)
        a, b = wrap(x, y)
        value = loss(model(a), a, b)
        value.backward()
        return value.item()

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-12)


def _added_to(loss, out):
    loss += out.pow(2).mean()
    return loss


AFTERWARDS = {
    "added to": _added_to,
    "its root": lambda loss, out: loss.sqrt(),
    "the root of it added to": lambda loss, out: _added_to(loss, out).sqrt(),
}


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("goes_on", AFTERWARDS.values(), ids=AFTERWARDS)
def test_a_number_for_a_log_is_that_of_the_line_that_made_it(goes_on, room):
    model, (x, y) = mlp(), batch()

    def program(wrap):
        a, b = wrap(x, y)
        out = model(a)
        loss = F.cross_entropy(out, b)
        log = loss * 2
        loss = goes_on(loss, out)
        loss.backward()
        return [loss.item(), log.item()]

    expected, found = assert_same_gradients(model, program, room)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("room", [None, 3])
def test_a_factor_of_the_batch_alone_is_computed_once(room):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.norm = mlp(), nn.BatchNorm1d(4).double().requires_grad_(False)

    (x, y), seen = batch(), []

    def program(wrap):
        a, b = wrap(x, y)
        torch.manual_seed(5)
        scale = F.dropout(model.norm(a)).abs().mean()
        loss = F.cross_entropy(model.net(a), b) * scale
        loss.backward()
        seen.append(
            (loss.item(), model.norm.running_mean.clone(), int(model.norm.num_batches_tracked))
        )
        model.norm.reset_running_stats()

    model = Scaled()
    assert_same_gradients(model, program, room)
    (loss, mean, n), (found, found_mean, found_n) = seen
    assert found == pytest.approx(loss, rel=1e-12)
    assert found_mean.allclose(mean)
    assert n == found_n == 1


@pytest.mark.parametrize("room", [None, 3])
def test_a_loss_of_one_element_keeps_its_shape(room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        loss = model(wrap(x)).std().reshape(1)
        loss.backward()
        return tuple(loss.detach().numpy().shape)

    assert assert_same_gradients(model, program, room) == ((1,), (1,))


INPUTS = {
    "normalized by the batch": lambda x: (x - x.mean(0)) / x.std(0),
    "mixed up": lambda x: 0.3 * x + 0.7 * x[torch.randperm(len(x))],
    "twice": lambda x: torch.cat([x, -x]),
    "written into": lambda x: x.mul_(2).sub_(1),
    "noise": lambda x: x + 0 * torch.randn_like(x),
}


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("prepare", INPUTS.values(), ids=INPUTS)
def test_what_is_made_of_the_batch_alone_may_mix_its_samples(prepare, room):
    model, (x, _) = mlp(), batch()

    def program(wrap):
        torch.manual_seed(5)
        model(prepare(wrap(x.clone()))).square().mean().backward()

    # a doubled batch is a product of twice the rows
    assert_same_gradients(model, program, room and 7)


@pytest.mark.parametrize("room", [None, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_labels_and_masks_that_are_plain_are_cut_with_the_batch(flat, room):
    model = mlp(n_out=6)
    x, _ = batch()
    y, mask = torch.randint(0, 3, (8, 2)), torch.rand(8, 6) > 0.5

    def program(wrap):
        out = model(wrap(x)).masked_fill(mask, -1.0).view(8, 2, 3)
        loss = (
            F.cross_entropy(out.reshape(-1, 3), y.view(-1))
            if flat
            else F.cross_entropy(out.transpose(1, 2), y)
        )
        loss.backward()

    assert_same_gradients(model, program, room)


def test_a_penalty_with_a_graph_of_its_own_counts_once():
    model, (x, y) = mlp(), batch()

    def program(wrap):
        penalty = 0.1 * model[0].weight.square().sum()
        (F.cross_entropy(model(wrap(x)), wrap(y)) + penalty).backward()

    assert_same_gradients(model, program, room=3)


@pytest.mark.parametrize("room", [None, 3])
def test_a_factor_that_is_trained_gets_its_gradient(room):
    model, (x, y) = nn.ModuleList([mlp()]), batch()
    factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.append(nn.ParameterList([factor]))

    def program(wrap):
        (F.cross_entropy(model[0](wrap(x)), y) * factor).backward()

    assert_same_gradients(model, program, room)


def test_batch_norm_in_training_is_refused_where_it_does_not_fit_and_nothing_changed():
    model = nn.Sequential(nn.BatchNorm1d(4), mlp()).double()
    x, y = batch()
    before = model[0].running_mean.clone()
    with RoomFor(3), pytest.raises(BatchCoupledError, match=r"batch_norm\(\) at .*test_losses"):
        F.cross_entropy(model(lazy(x)), y).backward()
    assert torch.equal(model[0].running_mean, before)
    assert all(p.grad is None for p in model.parameters())


def _infonce(out, y):
    a, b = out[:, :-1], out[:, 1:]
    return F.cross_entropy(a @ b.mT, torch.arange(out.shape[0]))


def _normalized(out, y):
    return F.cross_entropy(F.batch_norm(out, None, None, training=True), y)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "call"), [(_infonce, "matmul"), (_normalized, "batch_norm")])
def test_a_call_in_the_middle_that_mixes_samples_is_named_where_the_rest_does_not_fit(loss, call):
    """What comes before it runs in micro-batches; what comes after it does not."""
    net, x = nn.Linear(4, 1024), torch.randn(512, 4)
    y, labels = torch.zeros(512, dtype=torch.long), [p.detach().clone() for p in net.parameters()]
    with (
        memory_budget("3MiB"),
        pytest.raises(
            BatchCoupledError, match=rf"{call}\(\) at .*test_losses.py:\d+ wants all s"
        ) as e,
    ):
        loss(net(lazy(x)), y).backward()
    assert "step() " not in str(e.value)
    assert "loss= gets" not in str(e.value)
    assert e.value.names[0].startswith(f"{call}() at")
    assert all(p.grad is None for p in net.parameters())
    assert all(map(torch.equal, labels, net.parameters()))


def test_a_result_that_does_not_fit_says_so():
    net, x = nn.Linear(4, 1024), torch.randn(1024, 4)
    with (
        memory_budget("2MiB"),
        pytest.raises(
            OutOfRetriesError, match=r"results do not fit: float32\[1024, 1024\].*4\.0 MiB"
        ),
        torch.no_grad(),
    ):
        net(lazy(x)).softmax(1).numpy()


@pytest.mark.parametrize("room", ["3MiB", "7MiB"])
def test_a_named_intermediate_that_does_not_fit_says_so(room):
    net, x = nn.Linear(4, 1024), torch.randn(1024, 4)
    with memory_budget(room):
        hidden = net(lazy(x))
        with pytest.raises(
            OutOfRetriesError, match=r"[Rr]esults .*: float32\[1024, 1024\], .* \(4.0 MiB"
        ):
            hidden.square().mean().backward()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("room", ["3600KiB", "2200KiB", "1200KiB"])
def test_nothing_is_warned_of_that_nobody_can_act_on(room, recwarn):
    """A few samples are compared without graphs, and in what memory there is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 3))
    x, y = torch.randn(600, 16), torch.randint(3, (600,))
    for _ in range(3):
        net.zero_grad()
        with memory_budget(room):
            F.cross_entropy(net(lazy(x)).softmax(1), y).sqrt().backward()
    assert not recwarn.list


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


def test_batch_norm_writes_its_statistics_once_whatever_is_read():
    model, (x, y) = nn.Sequential(nn.BatchNorm1d(4), mlp()).double(), batch()
    expected = nn.BatchNorm1d(4).double()
    expected(x)
    out = model(lazy(x))
    loss = F.cross_entropy(out, y)
    assert loss.item() == loss.item()
    assert str(out)
    loss.backward()
    assert out.argmax(1).tolist()
    torch.testing.assert_close(model[0].running_mean, expected.running_mean)
    assert model[0].num_batches_tracked == 1


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
    model = nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 4), nn.Dropout(0.5)).double()
    x = torch.ones(64, 4, dtype=torch.float64)
    zeros = (model(lazy(x)) == 0).double().mean().item()
    assert 0.2 < zeros < 0.8
    drop = nn.Dropout(0.0)
    assert (drop(lazy(x)) == 0).sum().item() == 0
    drop.p = 0.5
    assert (drop(lazy(x)) == 0).sum().item() > 0
