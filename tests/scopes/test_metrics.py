"""Metrics of torchmetrics in blocks: their declared state and their results are their own."""

import pickle

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric, MeanMetric, RunningMean, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.wrappers import MinMaxMetric

from tenure import NewDisposeScope

from .test_training import bits

STEPS = 3


def values(n: int) -> tuple[Tensor, ...]:
    return (torch.rand(8, generator=torch.Generator().manual_seed(n)),)


def classes(n: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    return torch.rand(8, 3, generator=generator), torch.randint(3, (8,), generator=generator)


def collection() -> Metric:
    """Its first two members share one state."""
    return MetricCollection(
        [MulticlassAccuracy(3), MulticlassF1Score(3), MulticlassConfusionMatrix(3)]
    )


METRICS = {
    "running mean": (lambda: RunningMean(window=2), values),
    "composition": (lambda: SumMetric() + 2 * MeanMetric(), values),
    "cloned collection": (lambda: collection().clone(prefix="train_"), classes),
    "unpickled": (lambda: pickle.loads(pickle.dumps(CatMetric())), values),
    "extremes that it does not declare": (lambda: MinMaxMetric(MeanMetric()), values),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_updated_or_called_in_blocks_computes_what_it_does_without_them(name):
    make, batch = METRICS[name]
    plain = make()
    with NewDisposeScope():
        ours = make()
    for n in range(STEPS):
        plain.update(*batch(n))
        with NewDisposeScope():
            ours.update(*batch(n))
    with NewDisposeScope():
        first = bits(ours.compute())
    assert first == bits(plain.compute())
    # out of the metric's cache, which torchmetrics 1.4 mixes up in a collection: so of both
    assert bits(ours.compute()) == bits(plain.compute())
    plain.reset()
    with NewDisposeScope():
        ours.reset()
    for n in range(STEPS):
        expected = bits(plain(*batch(n)))
        with NewDisposeScope():
            assert bits(ours(*batch(n))) == expected
    assert bits(ours.compute()) == bits(plain.compute())
