"""Every module of torch's own database computes and trains paged as it does whole, bit for bit.

Between any two runs all goes from the device and is written over. Here are a few samples of each;
`python -m benchmarks.sweep_paging` runs all of them.
"""

import pytest
from torch import nn

from benchmarks._corpus_modules import differs_in_training, names, samples_of
from benchmarks._paged_cycles import Call, Cycles

# What torch's samples warn of, deprecated arguments and uneven strides, is not of paging.
pytestmark = pytest.mark.filterwarnings("ignore")

N_SAMPLES = 3
# plain weights, buffers that are written, rows, flat weights, children's weights
# that the parent reads, and none
BRANCHES = {
    "nn.BatchNorm2d", "nn.Conv1d", "nn.Embedding", "nn.GRU", "nn.Linear",
    "nn.MSELoss", "nn.MultiheadAttention", "nn.TransformerEncoderLayer",
}  # fmt: skip
for_every_module = pytest.mark.parametrize(
    ("name", "n_samples"),
    [
        *((name, 1) for name in sorted(BRANCHES)),
        *(pytest.param(name, N_SAMPLES, marks=pytest.mark.exhaustive) for name in names()),
    ],
)


def differences(sim, name, n_samples, *, training, trains):
    samples = samples_of(name, training=training, most=n_samples)
    if not any(list(sample.module.parameters()) for sample in samples):
        # Without weights there is little to page.
        samples = samples[:1]
    modules = nn.ModuleList([sample.module for sample in samples]).train(training)
    calls = [Call(f"{i}", *sample[1:]) for i, sample in enumerate(samples)]
    return Cycles(sim, modules, trains=trains).differences(calls)


@for_every_module
def test_outputs(sim, name, n_samples):
    for training in (False, True)[: 1 + differs_in_training(name)]:
        assert differences(sim, name, n_samples, training=training, trains=False) == []


@for_every_module
def test_gradients(sim, name, n_samples):
    assert differences(sim, name, n_samples, training=True, trains=True) == []


def test_the_database_is_as_large_as_it_was():
    assert len(names()) >= 114
    assert set(names()) >= BRANCHES
