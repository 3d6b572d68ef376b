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


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x)).mean(1))


def mlp():
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(32, 4)), torch.randn(200, 32, dtype=torch.float64)


def cnn():
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(first, last), torch.randn(120, 3, 8, 8, dtype=torch.float64)


def transformer():
    return Transformer(), torch.randint(50, (60, 12))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


class Training:
    """A model, its batch, and what the whole batch gives."""

    def __init__(self, kind, device="cpu"):
        torch.manual_seed(0)
        net, x = MODELS[kind]()
        self.net = net.double().to(device)
        self.asked = Asked()
        y = torch.randint(4, (len(x),))
        self.batch = {"x": x.to(device), "y": y.to(device)}
        with memory_budget(1 << 40, device) as budget:
            self.loss(self.batch).backward()
        self.whole_bytes = budget.peak_bytes
        self.wanted = self.gradients()
        self.net.zero_grad()
        self.n_samples = len(x)

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


# the transformer is the one of the accelerator below
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["mlp", "cnn", pytest.param("transformer", marks=pytest.mark.slow)]
)
def test_the_first_step_under_a_budget_runs_out_of_nothing_and_has_95_percent(kind):
    training = Training(kind)
    statistics().reset()
    with memory_budget(training.whole_bytes // 3):
        result = step(training.loss, training.batch, predict=True)
        assert (result.attempts, statistics().ooms) == (1, 0)
        assert training.error() <= 1e-10
        assert training.fits(result.micro_batch)
        assert not training.fits(int(result.micro_batch / 0.95) + 1)


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("kind", MODELS)
def test_the_first_step_on_an_accelerator_runs_out_of_nothing_and_has_95_percent(sim, kind):
    training = Training(kind, sim.device)
    sim.budget_bytes = sim.allocated_bytes + training.whole_bytes // 3
    statistics().reset()
    result = step(training.loss, training.batch, predict=True)
    assert (result.attempts, statistics().ooms) == (1, 0)
    assert training.error() <= 1e-10
    assert training.fits(result.micro_batch)
    assert not training.fits(int(result.micro_batch / 0.95) + 1)


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("cuda")
def test_segments_that_an_allocator_takes_are_predicted_too(sim):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)]
    net, x = nn.Sequential(*layers).to(sim.device), torch.randn(40_000, 64).to(sim.device)

    def loss(b):
        return net(b).square().mean()

    sim.module.empty_cache()
    held = sim.reserved_bytes
    loss(x).backward()
    sim.budget_bytes = held + (sim.module.max_memory_reserved() - held) // 3
    net.zero_grad()
    statistics().reset()
    result = step(loss, x, predict=True)
    assert (result.attempts, statistics().ooms) == (1, 0)
    net.zero_grad()
    # a segment is an eighth of that memory
    size = int(result.micro_batch / 0.85) + 1
    with pytest.raises(OutOfRetriesError):
        step(loss, x, maximum=size, minimum=size, cache_type=NoBatchsizeCache)


def stateful():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 16)]
    return nn.Sequential(*layers), torch.randn(128, 16)


def state_of(net):
    buffers = [buffer.clone() for buffer in net.buffers()]
    return [*buffers, *(p.grad.clone() for p in net.parameters()), torch.get_rng_state()]


def test_a_prediction_leaves_nothing_behind():
    net, x = stateful()
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
        return result, state_of(net)

    before = {name: value.clone() for name, value in net.state_dict().items()}
    result, left = outcome(predict=True)
    assert 1 < len(result.sizes) == len(kept)
    assert result.attempts == 1
    assert type(scaler._scale) is torch.Tensor
    assert all(type(p.data) is torch.Tensor for p in net.parameters())
    same = {"maximum": result.micro_batch, "cache_type": NoBatchsizeCache}
    assert all(torch.equal(a, b) for a, b in zip(left, outcome(**same)[1], strict=True))


@pytest.mark.slow
def test_what_is_remembered_is_not_predicted_again():
    training = Training("mlp")
    optimizer = torch.optim.AdamW(training.net.parameters())
    batch, sizes = training.batch, []
    statistics().reset()
    with memory_budget(training.whole_bytes // 2):
        for _ in range(5):
            sizes.append(step(training.loss, batch, predict=True).micro_batch)
            n_asked = len(training.asked.sizes())
            # its state takes memory, and the size is then made smaller by what was measured
            optimizer.step()
            optimizer.zero_grad()
    assert n_asked == 0
    assert statistics().ooms == 0
    assert sizes[0] > sizes[1]


@pytest.mark.slow
def test_a_batch_that_is_larger_than_what_is_known_is_predicted():
    training = Training("mlp")
    small = {name: value[:20] for name, value in training.batch.items()}

    def run(batch):
        training.net.zero_grad()
        return step(training.loss, batch, predict=True).sizes, training.asked.sizes()

    with memory_budget(training.whole_bytes // 3):
        sizes, asked = run(small)
        assert (sizes, asked[0]) == ((20,), 20)
        assert run(small)[1] == []
        assert run(training.batch)[1][0] == training.n_samples
        assert run(training.batch)[1] == []
    assert statistics().ooms == 0


def test_where_memory_is_not_measured_nothing_is_predicted():
    training = Training("mlp")
    assert step(training.loss, training.batch, predict=True).attempts == 1
    assert training.asked.sizes() == []


def test_a_step_that_can_not_be_predicted_begins_with_the_whole_batch(caplog):
    training, seen = Training("mlp"), []

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


def test_what_is_refused_is_refused_as_without_a_prediction():
    net, x = stateful()
    with memory_budget("40KiB"), pytest.raises(BatchCoupledError, match="BatchNorm1d"):
        step(lambda b: net(b).square().mean(), x, predict=True)
    training = Training("mlp")
    with memory_budget(training.whole_bytes // 3), pytest.raises(SplitMismatchError):
        step(lambda b: training.loss(b).sqrt(), training.batch, predict=True)


def test_a_prediction_that_is_too_low_is_caught_by_the_retry():
    training = Training("mlp")

    def loss(batch):
        # of all layers, a prediction sees the last
        net = training.net if is_real(training.net) else training.net[-1]
        return F.cross_entropy(net(batch["x"]), batch["y"])

    with memory_budget(training.whole_bytes // 3):
        result = step(loss, training.batch, predict=True)
        assert result.attempts > 1
        assert training.error() <= 1e-10
        assert not training.fits(int(result.micro_batch / 0.95) + 1)


@pytest.mark.slow
def test_a_loss_on_outputs_is_predicted_with_all_outputs():
    training = Training("mlp")
    y = training.batch["y"]
    options = {"loss": lambda out: F.cross_entropy(out, y), "predict": True}

    def outputs(batch):
        training.asked.note(training.net, len(batch["x"]))
        return training.net(batch["x"])

    with memory_budget(training.whole_bytes // 3) as budget:
        result = step(outputs, training.batch, **options)
    assert budget.peak_bytes <= training.whole_bytes // 3
    assert result.attempts == 1
    assert training.asked.sizes()[0] == training.n_samples
    assert training.error() <= 1e-10


def test_no_prediction_runs_the_backward_of_the_caller():
    training, losses = Training("mlp"), []

    def backward(loss):
        losses.append(loss.item())
        loss.backward()

    with memory_budget(training.whole_bytes // 3):
        result = step(training.loss, training.batch, backward=backward, predict=True)
    assert training.asked.sizes()
    assert len(losses) == len(result.sizes) > 1
    assert training.error() <= 1e-10
