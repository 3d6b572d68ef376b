"""Gradients and values of losses, whole and in micro-batches, are those of plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import BatchCoupledError, OutOfRetriesError, lazy, memory_budget, reset

from ..step.step_cases import gradients, wanted_of
from .programs import ROOMS, RoomFor, Vision, assert_same, batch, mlp

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
    "weights of classes of the batch": lambda out, x, y: F.cross_entropy(
        out, y, weight=1.0 / torch.bincount(y, minlength=3).clamp(min=1).double()
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
def test_gradients_and_loss_are_those_of_plain_tensors(loss, room, model, x, y):

    def program(wrap):
        torch.manual_seed(5)
        a, b = wrap(x, y)
        value = loss(model(a), a, b)
        value.backward()
        assert tuple(value.detach().numpy().shape) == tuple(value.shape)
        return value.item()

    assert_same(model, program, room, rtol=1e-12)


def test_a_term_needs_one_pass(model, x):
    n_rows = []
    for _ in range(9):
        with RoomFor(3) as room:
            out = model(lazy(x)).log_softmax(1)
            F.kl_div(out, lazy(x[:, :3]).softmax(1), reduction="batchmean").backward()
        n_rows.append(sum(room.rows))
    # the first steps are verified
    assert min(n_rows) == 8


@pytest.mark.parametrize("room", [8, 4, 2])
def test_a_single_sample_that_is_left_over_is_a_batch_too(room):
    model, (x, y) = nn.ModuleList([mlp(), mlp(n_in=3)]), batch(9)

    def program(wrap):
        loss = F.cross_entropy(model[1](model[0](wrap(x)).squeeze()), wrap(y))
        loss.backward()
        return loss.item()

    assert_same(model, program, room, rtol=1e-12)


def test_a_call_in_the_middle_that_mixes_samples_is_named_where_the_rest_does_not_fit():
    """What comes before it runs in micro-batches; what comes after it does not."""
    net, x = nn.Linear(4, 1024), torch.randn(512, 4)
    y = torch.zeros(512, dtype=torch.long)

    def normalized(out):
        return F.batch_norm(out, None, None, training=True)

    told = r"batch_norm\(\) at .*test_losses.py:\d+ wants all s"
    with memory_budget("3MiB"), pytest.raises(BatchCoupledError, match=told) as caught:
        F.cross_entropy(normalized(net(lazy(x))), y).backward()
    assert "step() " not in str(caught.value)
    assert "loss= gets" not in str(caught.value)
    assert caught.value.names[0].startswith("batch_norm() at")
    assert all(p.grad is None for p in net.parameters())


def test_results_that_do_not_fit_say_so():
    net, x = nn.Linear(4, 1024), torch.randn(1024, 4)
    told = r"results do not fit: float32\[1024, 1024\].*4\.0 MiB"
    with memory_budget("2MiB"), pytest.raises(OutOfRetriesError, match=told), torch.no_grad():
        net(lazy(x)).softmax(1).numpy()
    told = r"[Rr]esults .*: float32\[1024, 1024\], .* \(4.0 MiB"
    with memory_budget("7MiB"):
        # one that has a name
        hidden = net(lazy(x))
        with pytest.raises(OutOfRetriesError, match=told):
            hidden.square().mean().backward()
    assert all(p.grad is None for p in net.parameters())


def test_the_first_of_two_passes_keeps_no_graph():
    """What was recorded with gradients on runs without, where whoever runs it wants none."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 1024), nn.Tanh(), nn.Linear(1024, 4)), torch.randn(1024, 4)
    expected = wanted_of(net, net(x).std(0).sum())
    with memory_budget("3MiB"):
        net(lazy(x)).std(0).sum().backward()
    torch.testing.assert_close(gradients(net), expected)


def test_what_does_not_fit_sample_by_sample_says_so(model, x):
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


# --- on a device whose memory runs out

SAMPLES = 4096


def test_it_retries_where_less_is_free_than_before(sim, model):
    sim(budget="64MiB")
    # computed once there is a device: autograd counts them when it first runs
    x, y = batch(SAMPLES)
    wanted = wanted_of(model, F.cross_entropy(model(x), y))
    model.to(sim.device)
    x, y = x.to(sim.device), y.to(sim.device)
    for taken_bytes in (0, 60 << 20):
        model.zero_grad()
        taken = torch.empty(taken_bytes, dtype=torch.uint8, device=sim.device)
        F.cross_entropy(model(lazy(x)), y).backward()
        assert (sim.n_ooms > 0) == (taken.numel() > 0)
    found = gradients(model.cpu())
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)


def test_autocast_holds_for_a_batch_that_the_program_moves_to_the_device(sim):
    model, found = Vision().float().to(sim.device), []
    x = batch()[0].float()
    for wrap in (lambda value: value, lazy):
        model.zero_grad()
        with torch.autocast(torch.device(sim.device).type, torch.bfloat16):
            out = model.inner(wrap(x).to(sim.device)) * model.scale.exp()
            loss = out.square().mean()
        loss.backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_calls_with_indices_are_tried_and_split(sim):
    sim(budget="64MiB")
    table, head = nn.Embedding(8, 4096, device=sim.device), nn.Linear(4096, 1, device=sim.device)
    ids = torch.arange(SAMPLES, device=sim.device) % 8
    head(table(lazy(ids)).relu()).sum().backward()
    assert sim.n_ooms > 0
