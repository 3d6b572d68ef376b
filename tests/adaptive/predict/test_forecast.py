"""Sizes that are predicted: what the prediction leaves, and what happens where it fails."""

import pytest
import torch

from tenure.adaptive import batch, find_batch_size, memory_budget, range
from tenure.adaptive._predict import Forecast

from ..finding import Training, network

pytestmark = pytest.mark.usefixtures("forgetful", "quiet")


def largest(train, budget):
    low, high = 1, 1 << 16
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if train.fits(middle, budget) else (low, middle - 1)
    return low


class Real(Training):
    """Notes sizes of runs on real tensors alone."""

    def __call__(self, size):
        known = len(self.sizes), len(self.failed)
        try:
            super().__call__(size)
        finally:
            if not self.is_real(self.net):
                del self.sizes[known[0] :], self.failed[known[1] :]

    def is_real(self, net):
        return type(next(net.parameters()).data) is torch.Tensor


@pytest.mark.parametrize("too_large", [1.5, 8, 60])
def test_the_first_run_of_a_batch_has_95_percent_after_one_failure(too_large):
    train = Real(network())
    budget = 4 << 20
    best = largest(train, budget)
    train.sizes.clear()
    with memory_budget(budget):
        batch(initial_batchsize=int(best * too_large), predict=True)(train)()
    failed, ran = train.sizes
    assert failed == int(best * too_large)
    assert 0.95 * best <= ran <= best


def test_a_batch_that_fits_predicts_nothing():
    tried = []
    batch(initial_batchsize=64, predict=True)(tried.append)()
    assert tried == [64]


def test_a_prediction_leaves_gradients_random_numbers_and_parameters_as_they_were():
    train = Training(network())
    Training(train.net)(4)
    before = [p.grad.clone() for p in train.net.parameters()]
    state = torch.get_rng_state()
    forecast = Forecast("train", train)
    assert forecast(64) > forecast(16) > 0
    assert forecast.works
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, b) for p, b in zip(train.net.parameters(), before, strict=True))
    assert all(type(p) is torch.nn.Parameter for p in train.net.parameters())


def test_work_that_leaves_torch_goes_on_as_without_predictions():
    net, sizes = network(), []

    def train(size):
        sizes.append(size)
        loss = net(torch.randn(size, 64)).square().mean()
        assert loss.detach().numpy() < 100
        loss.backward()

    with memory_budget("4MiB"):
        batch(initial_batchsize=20_000, predict=True)(train)()
    # the prediction in between is in vain, and leaves no size in the list
    assert sizes[:2] == [20_000, 10_000]
    sizes.clear()
    assert find_batch_size(train, high=10**6, budget="4MiB", predict=True) in sizes


def test_an_optimizer_in_the_work_is_not_stepped_by_a_prediction():
    net = network()
    optimizer = torch.optim.Adam(net.parameters())

    def train(size):
        net(torch.randn(size, 64)).square().mean().backward()
        optimizer.step()

    forecast = Forecast("train", train)
    assert forecast(64) == 0
    assert not forecast.works
    assert not optimizer.state
    assert all(p.grad is None for p in net.parameters())


def test_a_prediction_that_is_too_low_is_asked_once(monkeypatch):
    asked = []

    def too_low(self, size):
        asked.append(size)
        return size * 64

    monkeypatch.setattr(Forecast, "__call__", too_low)
    train = Training(network())
    with memory_budget("4MiB"):
        batch(initial_batchsize=200_000, predict=True)(train)()
    n_asked = len(asked)
    assert asked[0] == 200_000
    assert train.sizes[1] < 66_000  # of 65,536 that it says fit
    assert train.sizes[2] <= train.sizes[1] // 2
    # what it says fits and has failed is not believed at all
    asked.clear()
    train.net.zero_grad()
    with memory_budget("4MiB"):
        batch(initial_batchsize=20_000, predict=True)(train)()
    assert asked == [20_000]
    assert n_asked < 20


def test_a_finding_that_predicts_comes_to_the_same_size():
    train = Real(network())
    found = find_batch_size(train, high=1 << 20, budget="4MiB", margin=0, predict=True)
    assert found >= 0.95 * largest(Training(train.net), 4 << 20)
    assert len(train.failed) <= 3
    assert found in train.sizes
    assert train.net[0][0].weight.grad is None


def test_a_range_has_no_use_for_predictions():
    done = []
    range(initial_step=4, predict=True)(lambda start, end: done.append(end))(0, 8)
    assert done == [4, 8]
