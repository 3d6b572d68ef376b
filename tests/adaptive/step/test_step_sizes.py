"""The size that the first step under a budget comes to, predicted or not, and those after it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import (
    BatchCoupledError,
    NoBatchsizeCache,
    OutOfRetriesError,
    SplitMismatchError,
    memory_budget,
    statistics,
    step,
)

from ..finding import Asked, is_real
from .step_cases import gradients, wanted_of, worst_error


class Training:
    """A model, its batch, and what the whole batch gives."""

    def __init__(self, device="cpu"):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
        self.net = nn.Sequential(*layers, nn.Linear(32, 4)).double().to(device)
        self.asked = Asked()
        x, y = torch.randn(200, 32, dtype=torch.float64), torch.randint(4, (200,))
        self.batch = {"x": x.to(device), "y": y.to(device)}
        with memory_budget(1 << 40, device) as budget:
            self.wanted = wanted_of(self.net, self.loss(self.batch))
        self.whole_bytes = budget.peak_bytes
        statistics().reset()

    def loss(self, batch):
        self.asked.note(self.net, len(batch["x"]))
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def error(self):
        return worst_error(gradients(self.net), self.wanted)

    def fits(self, size):
        """Whether a step in micro-batches of a size fits."""
        self.net.zero_grad()
        try:
            step(self.loss, self.batch, maximum=size, minimum=size, cache_type=NoBatchsizeCache)
        except OutOfRetriesError:
            return False
        finally:
            self.net.zero_grad()
        return True

    def check(self, result, predict=True):
        """A first step is exact, and has 95 % of what fits; predicted, it ran out of nothing."""
        if predict:
            assert (result.attempts, statistics().ooms) == (1, 0)
        assert result.attempts <= 4
        assert self.error() <= 1e-10
        assert self.fits(result.micro_batch)
        assert not self.fits(int(result.micro_batch / 0.95) + 1)


@pytest.fixture
def training():
    return Training()


@pytest.mark.parametrize(("share", "predict"), [(0.2, False), (0.9, False), (0.33, True)])
def test_the_first_step_comes_to_95_percent_of_what_fits_with_three_failures_or_none(
    training, share, predict
):
    losses = []

    def backward(loss):
        losses.append(loss.item())
        loss.backward()

    with memory_budget(int(training.whole_bytes * share)):
        result = step(training.loss, training.batch, backward=backward, predict=predict)
        # no prediction and no trial runs the backward of the caller
        assert len(losses) >= len(result.sizes) > 1
        assert not predict or len(losses) == len(result.sizes)
        training.check(result, predict)


@pytest.mark.sim_allocator("exact")
def test_the_first_step_on_an_accelerator_runs_out_of_nothing_and_has_95_percent(sim):
    training = Training(sim.device)
    sim.budget_bytes = sim.allocated_bytes + training.whole_bytes // 3
    training.check(step(training.loss, training.batch, predict=True))


def test_what_is_tried_out_or_predicted_leaves_nothing_behind():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 16)]
    net, x = nn.Sequential(*layers), torch.randn(128, 16)
    scaler, seen = torch.amp.GradScaler("cpu"), []

    def fn(b):
        seen.append(len(b))
        net.last = len(b)
        return net(b).square().mean()

    def outcome(**options):
        seen.clear()
        net.load_state_dict(before)
        net.zero_grad()
        torch.manual_seed(5)
        with memory_budget("40KiB") as budget:
            result = step(fn, x, batchnorm="per_chunk", scaler=scaler, verify=False, **options)
        assert budget.peak_bytes <= 40 << 10
        left = [*net.buffers(), *(p.grad for p in net.parameters())]
        return result, [*map(torch.clone, left), torch.get_rng_state()]

    before = {name: value.clone() for name, value in net.state_dict().items()}
    for predict in (True, False):
        result, left = outcome(predict=predict, cache_type=NoBatchsizeCache)
        assert len(result.sizes) > 1
        # without a prediction, the whole fails, and pairs of one micro-batch are tried
        assert (len(seen) == len(result.sizes)) == (result.attempts == 1) == predict
        assert type(scaler._scale) is torch.Tensor
        assert all(type(p.data) is torch.Tensor for p in net.parameters())
        same = {"maximum": result.micro_batch, "cache_type": NoBatchsizeCache}
        assert all(map(torch.equal, left, outcome(**same)[1]))
    with memory_budget("40KiB"), pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda b: net(b).square().mean(), x, predict=True)


# --- predictions


def test_what_is_remembered_is_not_predicted_again_and_a_larger_batch_is(training):
    small = {name: value[:20] for name, value in training.batch.items()}

    def run(batch):
        training.net.zero_grad()
        return step(training.loss, batch, predict=True).sizes, training.asked.sizes()

    # where memory is not measured nothing is predicted
    assert run(small) == ((20,), [])
    with memory_budget(training.whole_bytes // 3):
        sizes, asked = run(small)
        assert (sizes, asked[0]) == ((20,), 20)
        assert run(small)[1] == []
        assert run(training.batch)[1][0] == 200
        assert run(training.batch)[1] == []
    assert statistics().ooms == 0


def test_a_prediction_that_is_too_low_is_caught_by_the_retry(training):
    def loss(batch):
        # of all layers, a prediction sees the last
        net = training.net if is_real(training.net) else training.net[-1]
        return F.cross_entropy(net(batch["x"]), batch["y"])

    y, budget_bytes = training.batch["y"], training.whole_bytes // 3
    with memory_budget(budget_bytes):
        result = step(loss, training.batch, predict=True)
        assert result.attempts > 1
        assert training.error() <= 1e-10
        with pytest.raises(SplitMismatchError):
            step(lambda b: training.loss(b).sqrt(), training.batch, predict=True)
    # a loss on outputs is predicted with all outputs
    training.net.zero_grad()
    with memory_budget(budget_bytes) as budget:
        options = {"loss": lambda out: F.cross_entropy(out, y), "predict": True}
        result = step(lambda b: training.net(b["x"]), training.batch, **options)
    assert budget.peak_bytes <= budget_bytes
    assert result.attempts == 1
    assert training.error() <= 1e-10


# --- later steps


def test_where_nothing_fitted_the_next_call_begins_as_if_nothing_were_known(training):
    """Not with single samples: how little memory there was says nothing of what there is now."""

    def run(budget_bytes):
        training.net.zero_grad()
        with memory_budget(budget_bytes):
            return step(training.loss, training.batch)

    for has_room in (True, False):
        with pytest.raises(OutOfRetriesError):
            run(12 << 10)
        if has_room:
            assert run(2 * training.whole_bytes).sizes == (200,)
        assert run(int(0.6 * training.whole_bytes)).micro_batch >= 50


def test_a_small_last_batch_of_an_epoch_lets_no_later_batch_run_out_of_memory():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(9)]
    net = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(net.parameters())
    attempts = []
    with memory_budget(580_000):
        for i in range(24):
            x = torch.randn(100 if i % 5 == 4 else 512, 32, dtype=torch.float64)
            attempts.append(step(lambda x: net(x).square().mean(), x, model=net).attempts)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert sum(attempts) > len(attempts)
    assert attempts[8:] == [1] * 16
