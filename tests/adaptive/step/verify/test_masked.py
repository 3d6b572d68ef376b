"""A masked mean is never taken for a sum, whichever samples of the batch count."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import SplitMismatchError, check_split, memory_budget, step

from ..step_cases import samples

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

    with pytest.raises(SplitMismatchError) as caught:
        step(fn, batch, maximum=110, loss="sum", in_dims=dims)
    assert "part of 0 " not in caught.value.advice
    with pytest.raises(SplitMismatchError) as caught:
        step(fn, batch, maximum=110, in_dims=dims)
    assert 'loss="sum"' not in caught.value.advice


def masked_mean(net):
    return lambda b: (net(b[0]).square().mean(1) * b[1]).sum() / b[1].sum().clamp(min=1)


# in the second one, memory runs out as it is asked whether the difference is rounding
@pytest.mark.parametrize(("width", "n", "budget"), [(256, 1000, "1500KiB"), (128, 500, "500KiB")])
def test_a_masked_mean_is_no_sum_where_memory_allows_few_samples(width, n, budget):
    torch.manual_seed(0)
    net, rows, mask = nn.Linear(width, width), torch.randn(n, width), torch.arange(n) % 50 == 0
    for options in ({}, {"loss": "sum"}):
        with memory_budget(budget), pytest.raises(SplitMismatchError) as caught:
            step(masked_mean(net), (rows, mask), **options)
        assert "weight=lambda batch: batch[1].sum()" in caught.value.advice
    assert net.weight.grad is None


@pytest.mark.parametrize(("most", "counting"), [(2, True), (2, False), (3, True)])
def test_a_masked_mean_is_no_sum_where_two_or_three_samples_fit(most, counting):
    net, n = nn.Linear(4, 3).double(), {2: 8, 3: 6}[most]

    def fn(b):
        if len(b["m"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return cross_entropy(net(b["x"]), b["m"], 255)

    batch = {"x": samples(n), "m": labels_of((torch.arange(n) % 3 == 2) == counting, 255)}
    with pytest.raises(SplitMismatchError):
        step(fn, batch, maximum=1, loss="sum")


def test_a_masked_sum_is_a_sum():
    net, mask = nn.Linear(4, 3).double(), torch.arange(300) % 50 == 0

    def fn(b):
        return (net(b[0]).square().mean(1) * b[1]).sum()

    batch = samples(300), mask
    with pytest.raises(SplitMismatchError, match='pass loss="sum"'):
        step(fn, batch, maximum=100)
    result = step(fn, batch, maximum=100, loss="sum")
    torch.testing.assert_close(result.loss, fn(batch).detach())


def test_check_split_advises_no_sum_for_samples_of_which_one_counts():
    net, mask = nn.Linear(4, 3).double(), torch.arange(8) == 6
    advice = check_split(masked_mean(net), (samples(8), mask)).advice
    assert "weight=lambda batch: batch[1].sum()" in advice
