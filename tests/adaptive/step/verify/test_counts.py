"""Clamped counts are refused where that changes the loss, and a masked mean is never a sum."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import check_split, memory_budget, step

from ...attempt.failures import out_of_memory_above
from ..step_cases import gradients, refused, samples, small_net, wanted_of, worst_error

N = 32


def batch_of(positives, n=N):
    """Samples, of which some have two positive labels each."""
    labels = torch.zeros(n, 3, dtype=torch.float64)
    labels[list(positives), :2] = 1
    return torch.randn(n, 4, dtype=torch.float64), labels


CLAMPED = {
    "python": lambda total, count, n: (total, max(int(count), 1)),
    "float": lambda total, count, n: (total, count.clamp(min=1.0)),
    "coarse": lambda total, count, n: (total, count.bfloat16().clamp(min=1)),
    "at 4": lambda total, count, n: (total, count.clamp(min=4)),
    "in a dict": lambda total, count, n: {"all": (total, n), "some": (total, count.clamp(min=1))},
}


def n_of(b):
    return b[1].sum().clamp(min=1)


def total_of(net, b):
    return F.binary_cross_entropy_with_logits(net(b[0]), b[1], reduction="sum")


@pytest.mark.parametrize(
    ("name", "size"), [*[(name, 8) for name in CLAMPED], ("float", 5), ("a weight", 8)]
)
def test_a_clamped_count_is_refused_once_a_micro_batch_has_none(name, size):
    net = small_net()

    def fn(b):
        if name == "a weight":
            return total_of(net, b) / n_of(b)
        return CLAMPED[name](total_of(net, b), b[1].sum(), len(b[0]))

    how = {"maximum": size} | ({"weight": n_of} if name == "a weight" else {})
    for _ in range(2):
        step(fn, batch_of(range(N)), **how)
    before = gradients(net)
    for positives in ([3], [3, 4], [], [N - 1]):
        error = refused(fn, batch_of(positives), **how)
        assert "Return it as it is" in str(error)
        assert "count" in str(error)
    assert worst_error(gradients(net), before) == 0


def test_a_clamped_count_of_single_samples_is_refused_and_what_the_advice_says_is_right():
    net = small_net()

    def fn(b):
        return CLAMPED["float"](total_of(net, b), b[1].sum(), 0)

    for _ in range(4):
        step(fn, batch_of(range(8), 8), maximum=1)
    advice = refused(fn, batch_of([3, 4, 5], 8), maximum=1).advice
    assert "Return it as it is" in advice
    assert "n = max(count(batch), 1)" in advice
    for positives in ([1, 3], []):
        b = batch_of(positives)
        n = max(int(b[1].sum()), 1)
        total, count = fn(b)
        loss = step(lambda b, n=n: total_of(net, b) / n, b, loss="sum", maximum=4).loss
        torch.testing.assert_close(loss, (total / count).detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("size", [8, 1])
def test_a_count_that_is_not_clamped_is_never_refused(size):
    net, n = small_net(), 8 if size == 1 else N

    def fn(b):
        total = total_of(net, b)
        return {"all": (total, len(b[0])), "positive": (total, b[1].sum().clamp(min=1e-12))}

    for positives in (range(n), range(0, n, 2), [3], [0, n - 1]):
        b = batch_of(positives, n)
        net.zero_grad()
        wanted = wanted_of(net, sum(total / count for total, count in fn(b).values()))
        step(fn, b, maximum=size)
        assert worst_error(gradients(net), wanted) < 1e-10


def test_a_count_that_python_draws_is_not_checked():
    net = small_net()

    def fn(b):
        drawn = torch.tensor([random.random() for _ in b])
        # never 0, which is no count that is looked at
        return (net(b).square().sum(1) * drawn).sum(), float((0.2 + drawn).sum())

    for seed in range(4):
        random.seed(seed)
        assert len(step(fn, samples(6), maximum=1).sizes) == 6


# --- masked means

COUNTING = {
    "the first rows": lambda i: i < 90,
    "2 rows": lambda i: (i == 7) | (i == 299),
    "all but 4 rows": lambda i: (i != 7) & (i != 120) & (i != 121) & (i != 299),
}


def labels_of(counts, ignored):
    return torch.where(counts, torch.arange(len(counts)) % 3, ignored)


def cross_entropy(outputs, labels, ignored):
    total = F.cross_entropy(outputs, labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)


MASKED = {
    "mask": (lambda c: c, lambda y, m: (y.square().mean(1) * m).sum() / m.sum().clamp(min=1)),
    "ignored above": (lambda c: labels_of(c, 255), lambda y, m: cross_entropy(y, m, 255)),
    "plain mean": (lambda c: labels_of(c, -100), F.cross_entropy),
    "lists": (
        lambda c: [torch.ones(int(each)).double() for each in c],
        lambda y, m: (
            sum((y[i].square().mean() * len(e) for i, e in enumerate(m)), y.sum() * 0)
            / max(sum(map(len, m)), 1)
        ),
    ),
}


@pytest.mark.parametrize(
    ("kind", "counting"),
    [*[(kind, "2 rows") for kind in MASKED], *[("mask", counting) for counting in COUNTING][::2]],
)
def test_a_masked_mean_is_never_taken_for_a_sum(kind, counting):
    net = nn.Linear(4, 3).double()
    made, loss = MASKED[kind]
    mask = made(COUNTING[counting](torch.arange(300)))
    batch = {"x": samples(300), "m": mask}
    dims = {"x": 0, "m": "items" if isinstance(mask, list) else 0}

    def fn(b):
        return loss(net(b["x"]), b["m"])

    error = refused(fn, batch, maximum=110, loss="sum", in_dims=dims)
    assert "part of 0 " not in error.advice
    assert 'loss="sum"' not in refused(fn, batch, maximum=110, in_dims=dims).advice


def masked_mean(net):
    return lambda b: (net(b[0]).square().mean(1) * b[1]).sum() / b[1].sum().clamp(min=1)


def test_a_mean_over_what_two_masks_let_through_is_no_sum():
    net, i = nn.Linear(4, 3).double(), torch.arange(300)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    batch = samples(300), torch.isin(i, rows[:10]), torch.isin(i, rows[8:18])
    refused(lambda b: masked_mean(net)((b[0], b[1] & b[2])), batch, maximum=100, loss="sum")


# in the second one, memory runs out as it is asked whether the difference is rounding
@pytest.mark.parametrize(("width", "n", "budget"), [(256, 1000, "1500KiB"), (128, 500, "500KiB")])
def test_a_masked_mean_is_no_sum_where_memory_allows_few_samples(width, n, budget):
    torch.manual_seed(0)
    net, rows, mask = nn.Linear(width, width), torch.randn(n, width), torch.arange(n) % 50 == 0
    for loss in ("mean", "sum"):
        with memory_budget(budget):
            error = refused(masked_mean(net), (rows, mask), maximum=None, loss=loss)
        assert "weight=lambda batch: batch[1].sum()" in error.advice
    assert net.weight.grad is None


@pytest.mark.parametrize(("most", "counting"), [(2, True), (2, False), (3, True)])
def test_a_masked_mean_is_no_sum_where_two_or_three_samples_fit(most, counting):
    net, n, check = nn.Linear(4, 3).double(), {2: 8, 3: 6}[most], out_of_memory_above(most)

    def fn(b):
        check(len(b["m"]))
        return cross_entropy(net(b["x"]), b["m"], 255)

    batch = {"x": samples(n), "m": labels_of((torch.arange(n) % 3 == 2) == counting, 255)}
    refused(fn, batch, maximum=1, loss="sum")


def test_a_masked_sum_is_a_sum_and_check_split_knows_a_mean():
    net, mask = nn.Linear(4, 3).double(), torch.arange(300) % 50 == 0

    def fn(b):
        return (net(b[0]).square().mean(1) * b[1]).sum()

    batch = samples(300), mask
    assert 'pass loss="sum"' in refused(fn, batch, maximum=100).advice
    result = step(fn, batch, maximum=100, loss="sum")
    torch.testing.assert_close(result.loss, fn(batch).detach())
    # of samples of which one counts
    advice = check_split(masked_mean(net), (samples(8), torch.arange(8) == 6)).advice
    assert "weight=lambda batch: batch[1].sum()" in advice


def test_a_mean_in_a_pair_is_named():
    net, x = small_net(), samples(16)

    def squares(b):
        return net(b).square().mean() * 1

    for others in (len, lambda b: (net(b) > 0).sum()):
        advice = refused(lambda b, others=others: (squares(b), others(b)), x).advice
        assert advice.startswith("A pair is (sum, count), and the first value of this one is a me")
