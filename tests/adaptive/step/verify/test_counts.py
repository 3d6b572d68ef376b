"""Counts that are clamped are refused where that changes the loss; all others are left alone."""

import random

import pytest
import torch
from torch.nn import functional as F

from tenure.adaptive import SplitMismatchError, step

from ..step_cases import samples, small_net

N = 32


def batch_of(positives, n=N):
    """Samples, of which some have two positive labels each."""
    labels = torch.zeros(n, 3, dtype=torch.float64)
    labels[list(positives), :2] = 1
    return torch.randn(n, 4, dtype=torch.float64), labels


def total_and_count(net, b):
    total = F.binary_cross_entropy_with_logits(net(b[0]), b[1], reduction="sum")
    return total, b[1].sum()


CLAMPED = {
    "python": lambda total, count, n: (total, max(int(count), 1)),
    "float": lambda total, count, n: (total, count.clamp(min=1.0)),
    "coarse": lambda total, count, n: (total, count.bfloat16().clamp(min=1)),
    "at 4": lambda total, count, n: (total, count.clamp(min=4)),
    "in a dict": lambda total, count, n: {"all": (total, n), "some": (total, count.clamp(min=1))},
}


@pytest.mark.parametrize(("name", "size"), [*[(name, 8) for name in CLAMPED], ("float", 5)])
def test_a_clamped_count_is_refused_once_a_micro_batch_has_none(name, size):
    net = small_net()

    def fn(b):
        return CLAMPED[name](*total_and_count(net, b), len(b[0]))

    for _ in range(2):
        step(fn, batch_of(range(N)), maximum=size)
    before = [p.grad.clone() for p in net.parameters()]
    for positives in ([3, 4], [], [N - 1]):
        with pytest.raises(SplitMismatchError, match="Return it as it is") as caught:
            step(fn, batch_of(positives), maximum=size)
        assert "count" in str(caught.value)
    assert all(map(torch.equal, before, [p.grad for p in net.parameters()]))


def test_a_clamped_weight_is_refused_too():
    net = small_net()

    def n_of(b):
        return b[1].sum().clamp(min=1)

    def fn(b):
        return total_and_count(net, b)[0] / n_of(b)

    for _ in range(2):
        step(fn, batch_of(range(N)), maximum=8, weight=n_of)
    with pytest.raises(SplitMismatchError, match="Return it as it is"):
        step(fn, batch_of([3]), maximum=8, weight=n_of)


def test_a_clamped_count_of_single_samples_is_refused():
    net = small_net()

    def fn(b):
        return CLAMPED["float"](*total_and_count(net, b), 0)

    for _ in range(4):
        step(fn, batch_of(range(8), 8), maximum=1)
    with pytest.raises(SplitMismatchError, match="Return it as it is"):
        step(fn, batch_of([3, 4, 5], 8), maximum=1)


@pytest.mark.parametrize("size", [8, 1])
def test_a_count_that_is_not_clamped_is_never_refused(size):
    net = small_net()

    def fn(b):
        total, count = total_and_count(net, b)
        return {"all": (total, len(b[0])), "positive": (total, count.clamp(min=1e-12))}

    n = 8 if size == 1 else N
    for positives in (range(n), range(0, n, 2), [3], [0, n - 1], [n - 1]):
        b = batch_of(positives, n)
        net.zero_grad()
        sum(total / count for total, count in fn(b).values()).backward()
        want = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        step(fn, b, maximum=size)
        for p, gradient in zip(net.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=0)


def test_counts_that_are_always_the_same_cost_next_to_nothing():
    net, extra = small_net(), []

    def fn(b):
        extra[-1] += len(b[0])
        return net(b[0]).square().sum(), 3 * len(b[0])

    for _ in range(30):
        extra.append(-N)
        step(fn, batch_of([]), maximum=8)
    assert not any(extra[3:])


def test_what_the_advice_says_is_right():
    net = small_net()

    def clamped(b):
        return CLAMPED["float"](*total_and_count(net, b), 0)

    with pytest.raises(SplitMismatchError) as caught:
        step(clamped, batch_of([1, 3, N - 1]), maximum=4)
    assert "n = max(count(batch), 1)" in caught.value.advice
    for positives in ([1, 3], []):
        b = batch_of(positives)
        n = max(int(b[1].sum()), 1)
        total, count = clamped(b)
        loss = step(lambda b, n=n: total_and_count(net, b)[0] / n, b, loss="sum", maximum=4).loss
        torch.testing.assert_close(loss, (total / count).detach(), rtol=1e-10, atol=0)


def test_a_count_that_python_draws_is_not_checked():
    net = small_net()

    def fn(b):
        drawn = torch.tensor([random.random() for _ in b])
        # never 0, which is no count that is looked at
        return (net(b).square().sum(1) * drawn).sum(), float((0.2 + drawn).sum())

    for seed in range(4):
        random.seed(seed)
        assert len(step(fn, samples(6), maximum=1).sizes) == 6
