"""Metrics of torchmetrics in blocks: their declared state and their results are their own."""

import copy
import io
import pickle

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, RunningMean, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryPrecisionRecallCurve,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from tenure import NewDisposeScope, is_disposed, scoped

STEPS = 3


def values(n: int) -> tuple[Tensor, ...]:
    return (torch.rand(8, generator=torch.Generator().manual_seed(n)),)


def scores(n: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    return torch.rand(8, generator=generator), torch.randint(2, (8,), generator=generator)


def classes(n: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    return torch.rand(8, 3, generator=generator), torch.randint(3, (8,), generator=generator)


def collection() -> Metric:
    """Its first two members share one state."""
    return MetricCollection(
        [MulticlassAccuracy(3), MulticlassF1Score(3), MulticlassConfusionMatrix(3)]
    )


METRICS = {
    "sum": (SumMetric, values),
    "mean": (MeanMetric, values),
    "max": (MaxMetric, values),
    "cat": (CatMetric, values),
    "running mean": (lambda: RunningMean(window=2), values),
    "list state": (BinaryAUROC, scores),
    "several results": (BinaryPrecisionRecallCurve, scores),
    "collection": (collection, classes),
    "wrapper": (lambda: MinMaxMetric(MulticlassAccuracy(3)), classes),
    "composition": (lambda: SumMetric() + 2 * MeanMetric(), values),
    "clone": (lambda: MeanMetric().clone(), values),
    "cloned collection": (lambda: collection().clone(prefix="train_"), classes),
    "unpickled": (lambda: pickle.loads(pickle.dumps(CatMetric())), values),
}
each_metric = pytest.mark.parametrize("name", METRICS)


def bits(tree: object) -> object:
    if isinstance(tree, Tensor):
        return tree.dtype, tree.tolist()
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(value) for value in tree] if isinstance(tree, list | tuple) else tree


@each_metric
def test_a_metric_updated_in_blocks_computes_what_it_does_without_them(name):
    make, batch = METRICS[name]
    plain, ours = make(), make()
    for n in range(STEPS):
        plain.update(*batch(n))
        with NewDisposeScope():
            ours.update(*batch(n))
    with NewDisposeScope():
        first = bits(ours.compute())
    assert first == bits(plain.compute())
    # out of the metric's cache, which torchmetrics 1.4 mixes up in a collection: so of both
    assert bits(ours.compute()) == bits(plain.compute())


@each_metric
def test_a_metric_called_in_blocks_gives_what_it_does_without_them(name):
    make, batch = METRICS[name]
    plain, ours = make(), make()
    for n in range(STEPS):
        expected = bits(plain(*batch(n)))
        with NewDisposeScope():
            assert bits(ours(*batch(n))) == expected
    assert bits(ours.compute()) == bits(plain.compute())
    with NewDisposeScope():
        ours.reset()
        ours.update(*batch(0))
    plain.reset()
    plain.update(*batch(0))
    assert bits(ours.compute()) == bits(plain.compute())


def test_the_tensors_of_a_step_beside_its_metrics_are_let_go():
    metric = MeanMetric()
    with NewDisposeScope():
        loss = torch.rand(4)
        metric.update(loss)
    assert is_disposed(loss)
    assert metric.compute() > 0


def test_a_metric_made_in_a_block_and_its_checkpoint_are_whole():
    with NewDisposeScope():
        metric = MeanMetric()
        metric.persistent(True)
        metric.update(torch.ones(3))
        saved = io.BytesIO()
        torch.save(metric.state_dict(), saved)
    saved.seek(0)
    with NewDisposeScope():
        metric.load_state_dict(torch.load(saved))
        metric.update(torch.zeros(3))
    assert metric.compute().item() == 0.5


def test_a_tracker_keeps_the_copies_it_makes_in_blocks():
    tracker = MetricTracker(MulticlassAccuracy(3))
    for n in range(STEPS):
        with NewDisposeScope():
            tracker.increment()
            tracker.update(*classes(n))
    assert tracker.compute_all().shape == (STEPS,)


class Logged(Metric):
    """What a training framework keeps for each value that a step logs."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("n_samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, value: Tensor, n_samples: int) -> None:
        self._forward_cache = value.clone()
        self.value = self.value + value * n_samples
        self.n_samples = self.n_samples + n_samples

    def compute(self) -> Tensor:
        return self.value / self.n_samples


class Framework(nn.Module):
    """A stand-in for Lightning: it logs by name, and makes each metric at its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.accuracy = torchmetrics.MeanSquaredError()
        self.results: dict[str, Logged] = {}

    def log(self, name: str, value: Tensor) -> None:
        if name not in self.results:
            self.results[name] = Logged()
        self.results[name].update(value.detach(), 4)

    def training_step(self, x: Tensor) -> Tensor:
        predicted = self.layer(x)
        loss = predicted.square().mean()
        self.accuracy(predicted, x.sum(1, keepdim=True))
        self.log("loss", loss)
        return loss


def in_a_block(step):
    def run(x: Tensor) -> None:
        with NewDisposeScope():
            step(x)

    return run


@pytest.mark.parametrize("wrap", [in_a_block, scoped])
def test_a_framework_that_logs_in_every_step_reads_its_log_afterwards(wrap):
    torch.manual_seed(0)
    framework = Framework()
    optimizer = torch.optim.AdamW(framework.parameters())
    logged = []

    @wrap
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        framework.training_step(x).backward()
        optimizer.step()

    for _ in range(STEPS):
        step(torch.ones(4, 2))
        logged.append(framework.results["loss"]._forward_cache.item())
    mean = framework.results["loss"].compute().item()
    assert mean == pytest.approx(sum(logged) / STEPS)
    assert framework.accuracy.compute() > 0


def test_a_copied_metric_is_known_as_the_one_it_was_copied_from():
    copied = copy.deepcopy(SumMetric())
    for _ in range(2):
        with NewDisposeScope():
            copied.update(torch.ones(2))
    assert copied.compute().item() == 4


class _WithBuffer(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(1), dist_reduce_fx="sum")
        self.register_buffer("weight", torch.ones(2))

    def update(self, x):
        self.total += x.sum()

    def compute(self):
        return self.total


def test_a_buffer_of_a_copied_metric_is_its_own():
    with NewDisposeScope():
        survivor = torch.ones(2)
    assert is_disposed(survivor)
    copied = copy.deepcopy(_WithBuffer())
    with NewDisposeScope():
        # past the hook of registrations
        copied._buffers["weight"] = copied.weight * 2
    assert copied.weight.tolist() == [2, 2]
