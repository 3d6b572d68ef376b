"""A step that predicts its size before it begins: nothing runs out of memory, or is lost."""

import logging

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

pytestmark = pytest.mark.usefixtures("forgetful")


class Training:
    """A model, its batch, and what the whole batch gives."""

    def __init__(self, device="cpu"):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
        self.net = nn.Sequential(*layers, nn.Linear(32, 4)).double().to(device)
        self.asked, self.n_samples = Asked(), 200
        x, y = torch.randn(200, 32, dtype=torch.float64), torch.randint(4, (200,))
        self.batch = {"x": x.to(device), "y": y.to(device)}
        with memory_budget(1 << 40, device) as budget:
            self.loss(self.batch).backward()
        self.whole_bytes = budget.peak_bytes
        self.wanted = self.gradients()
        self.net.zero_grad()

    def loss(self, batch):
        self.asked.note(self.net, len(batch["x"]))
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def gradients(self):
        return [p.grad.cpu() for p in self.net.parameters()]

    def error(self):
        pairs = zip(self.gradients(), self.wanted, strict=True)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

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

    def check(self, result):
        """The first step ran out of nothing, is exact, and has 95 % of what fits."""
        assert (result.attempts, statistics().ooms) == (1, 0)
        assert self.error() <= 1e-10
        assert self.fits(result.micro_batch)
        assert not self.fits(int(result.micro_batch / 0.95) + 1)


@pytest.fixture
def training():
    statistics().reset()
    return Training()


def test_the_first_step_under_a_budget_runs_out_of_nothing_and_has_95_percent(training):
    losses = []

    def backward(loss):
        losses.append(loss.item())
        loss.backward()

    with memory_budget(training.whole_bytes // 3):
        result = step(training.loss, training.batch, backward=backward, predict=True)
        # no prediction runs the backward of the caller
        assert len(losses) == len(result.sizes) > 1
        training.check(result)


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
def test_the_first_step_on_an_accelerator_runs_out_of_nothing_and_has_95_percent(sim):
    training = Training(sim.device)
    sim.budget_bytes = sim.allocated_bytes + training.whole_bytes // 3
    statistics().reset()
    training.check(step(training.loss, training.batch, predict=True))


def test_a_prediction_leaves_nothing_behind():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 16)]
    net, x = nn.Sequential(*layers), torch.randn(128, 16)
    scaler, kept = torch.amp.GradScaler("cpu"), []

    def fn(b):
        kept.append(len(b))
        net.last = len(b)
        return net(b).square().mean()

    def outcome(**options):
        net.load_state_dict(before)
        net.zero_grad()
        torch.manual_seed(5)
        with memory_budget("40KiB") as budget:
            result = step(fn, x, batchnorm="per_chunk", scaler=scaler, verify=False, **options)
        assert budget.peak_bytes <= 40 << 10
        left = [*net.buffers(), *(p.grad for p in net.parameters())]
        return result, [*map(torch.clone, left), torch.get_rng_state()]

    before = {name: value.clone() for name, value in net.state_dict().items()}
    result, left = outcome(predict=True)
    assert 1 < len(result.sizes) == len(kept)
    assert result.attempts == 1
    assert type(scaler._scale) is torch.Tensor
    assert all(type(p.data) is torch.Tensor for p in net.parameters())
    same = {"maximum": result.micro_batch, "cache_type": NoBatchsizeCache}
    assert all(map(torch.equal, left, outcome(**same)[1]))
    with memory_budget("40KiB"), pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda b: net(b).square().mean(), x, predict=True)


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
        assert run(training.batch)[1][0] == training.n_samples
        assert run(training.batch)[1] == []
    assert statistics().ooms == 0


def test_a_step_that_can_not_be_predicted_begins_with_the_whole_batch(training, caplog):
    seen = []

    def fn(batch):
        seen.append(len(batch["x"]))
        loss = training.loss(batch)
        assert loss.detach().numpy() < 100
        return loss

    with caplog.at_level(logging.INFO, "tenure.adaptive"), memory_budget(training.whole_bytes // 3):
        result = step(fn, training.batch, predict=True, verify=False)
    assert "goes on without predictions: size 200 could not be predicted" in caplog.text
    assert seen[0] == 200
    assert result.attempts > 1
    assert training.error() <= 1e-10


def test_a_prediction_that_is_too_low_is_caught_by_the_retry(training):
    def loss(batch):
        # of all layers, a prediction sees the last
        net = training.net if is_real(training.net) else training.net[-1]
        return F.cross_entropy(net(batch["x"]), batch["y"])

    with memory_budget(training.whole_bytes // 3):
        result = step(loss, training.batch, predict=True)
        assert result.attempts > 1
        assert training.error() <= 1e-10
        with pytest.raises(SplitMismatchError):
            step(lambda b: training.loss(b).sqrt(), training.batch, predict=True)


def test_a_loss_on_outputs_is_predicted_with_all_outputs(training):
    y = training.batch["y"]

    def outputs(batch):
        training.asked.note(training.net, len(batch["x"]))
        return training.net(batch["x"])

    with memory_budget(training.whole_bytes // 3) as budget:
        options = {"loss": lambda out: F.cross_entropy(out, y), "predict": True}
        result = step(outputs, training.batch, **options)
    assert budget.peak_bytes <= training.whole_bytes // 3
    assert result.attempts == 1
    assert training.asked.sizes()[0] == training.n_samples
    assert training.error() <= 1e-10
