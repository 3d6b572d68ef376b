"""Sizes that are predicted: what the prediction leaves, and what happens where it fails."""

import logging

import pytest
import torch

from tenure.adaptive import batch, memory_budget

from ..finding import Asked, Training, is_real, network

pytestmark = pytest.mark.usefixtures("quiet")


def largest(train, budget):
    low, high = 1, 1 << 16
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if train.fits(middle, budget) else (low, middle - 1)
    return low


@pytest.mark.parametrize("too_large", [1.5, 60])
def test_the_first_run_of_a_batch_has_95_percent_after_one_failure(too_large):
    train = Training(network())
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


def test_a_prediction_leaves_gradients_random_numbers_and_parameters_as_they_were(caplog):
    train, asked, seen, failed = Training(network()), Asked(), [], []
    parameters = [*train.net.parameters()]
    train(4)
    before = [p.grad.clone() for p in parameters]

    def work(size):
        asked.note(train.net, size)
        if is_real(train.net):
            gradients = [p.grad.clone() for p in parameters if p.grad is not None]
            seen.append((torch.get_rng_state(), gradients))
        try:
            train(size)
        except torch.OutOfMemoryError:
            failed.append(torch.get_rng_state())
            raise

    with caplog.at_level(logging.INFO, "tenure.adaptive"), memory_budget("4MiB"):
        batch(initial_batchsize=20_000, predict=True)(work)()
    assert "without predictions" not in caplog.text
    # when the first size had failed
    assert len(asked.sizes()) > 1
    state, gradients = seen[1]
    assert torch.equal(state, failed[0])
    assert len(gradients) == len(before)
    assert all(map(torch.equal, gradients, before))
    assert all(type(p) is torch.nn.Parameter for p in parameters)


def test_work_that_leaves_torch_goes_on_as_without_predictions(caplog):
    net, sizes = network(), []

    def train(size):
        sizes.append(size)
        loss = net(torch.randn(size, 64)).square().mean()
        assert loss.detach().numpy() < 100
        loss.backward()

    with caplog.at_level(logging.INFO, "tenure.adaptive"), memory_budget("4MiB"):
        batch(initial_batchsize=20_000, predict=True)(train)()
    assert "goes on without predictions: size 20000 could not be predicted (" in caplog.text
    # the prediction in between is in vain, and leaves no size in the list
    assert sizes[:2] == [20_000, 10_000]


def test_an_optimizer_in_the_work_is_not_stepped_by_a_prediction(caplog):
    net, asked, seen = network(), Asked(), []
    optimizer = torch.optim.Adam(net.parameters())

    def train(size):
        asked.note(net, size)
        if is_real(net):
            seen.append((len(optimizer.state), [p.grad for p in net.parameters()]))
        net(torch.randn(size, 64)).square().mean().backward()
        optimizer.step()

    with caplog.at_level(logging.INFO, "tenure.adaptive"), memory_budget("4MiB"):
        batch(initial_batchsize=20_000, predict=True)(train)()
    assert len(asked.sizes()) == 1
    assert "goes on without predictions" in caplog.text
    # the first has failed before it steps
    assert seen[1] == (0, [None] * 6)
